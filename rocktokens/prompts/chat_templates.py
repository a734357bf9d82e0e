"""Chat templates of a pair: the student's is the one that is used, and what that does where the teacher's differs."""

from __future__ import annotations

from typing import Any

# What the templates are tried on: a prompt as the stages make it, and one with a system message before it.
QUESTION = {"role": "user", "content": "What is 3 + 4?"}
CONVERSATIONS = ([QUESTION], [{"role": "system", "content": "Be brief."}, QUESTION])
SHOWN = 40  # characters from the first difference on


def what_templates_do(student: Any, teacher: Any) -> str:
    """One or two sentences on which chat template prompts go through, and what the teacher sees because of it.

    Args:
        student: the student's tokenizer.
        teacher: the teacher's.
    """
    ours, theirs = student.chat_template, teacher.chat_template
    if not ours and not theirs:
        return "Neither model has a chat template: prompts are plain text."
    if not ours:
        return (
            "Only the teacher has a chat template. Prompts go through the student's, so they must be plain text: chat "
            "messages are refused, and the teacher scores text without the marks that it was trained with."
        )
    used = "Prompts that are chat messages go through the student's template, and the teacher scores the same token ids"
    if not theirs:
        return f"Only the student has a chat template. {used}: marks that it may not have been trained with."
    if ours == theirs:
        return "Both models have the same chat template."
    for messages in CONVERSATIONS:
        first, second = _rendered(student, messages), _rendered(teacher, messages)
        if first != second:
            at = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
            return (
                f"The chat templates differ: the student's gives …{first[at : at + SHOWN]!r} where the teacher's gives "
                f"…{second[at : at + SHOWN]!r}. {used}: a prompt that the teacher was not trained on, so a part of the "
                "loss may be about the template."
            )
    return f"The chat templates differ in their source but render plain conversations alike. {used}."


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates are programs of their own and raise what they like
        return f"refused: {error}"
