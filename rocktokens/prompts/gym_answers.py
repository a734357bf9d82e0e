"""What a rollout gives as its answer to a reasoning-gym problem.

Models state answers in many ways. Where a text may be read in two, both readings are given, and the task's scorer
decides: a period may end a sentence or belong to the answer, spaces before a line may be its layout.
"""

from __future__ import annotations

import json
import re

TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
WORDED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
STATED = re.compile(r"(?:####|(?:final\s+)?answer[\s*]*(?:is\b\s*:?|:))[\s*$`]*(\S.*)", re.IGNORECASE)
# A minus sign that follows a number, a name or a bracket subtracts.
NUMBER = re.compile(
    r"(?:(?<![\w)\]}])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)",
)
DIVISOR = re.compile(r"\s*/\s*(\d+)")
DASHES = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-"})
# Thousands as LaTeX writes them: 1{,}234 and 1\,234.
GROUPED = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,)(?=\d{3}(?!\d))")
# What follows is a reason, not the result.
ASIDE = re.compile(
    r"[.;]\s|(?<=\d)\s+\(|[,\s]\s*(?:because|since|as|where|which|when|if|given|for|so)\b", re.IGNORECASE
)
DECORATION = " \t:*$`"
# Markdown before a sentence's end: the sentence is not part of what stands in bold.
BOLD_END = re.compile(r"[*$`]+[.,!]+$")
FENCE = re.compile(r"\s*```\w*\s*")
JSON_CHARACTERS = 20_000  # at the end of a text that are searched for JSON


def stated_answer(text: str, reference: str | None) -> str | None:
    """What a rollout most likely gives as its final answer."""
    return readings(text, reference)[0]


def readings(text: str, reference: str | None) -> list[str | None]:
    """What a rollout may give as its final answer, likeliest first; [None] where it gives none.

    The last of: an <answer> element; a \\boxed formula; what follows `####`, "answer is" or "answer:"; the last number
    where the reference is a number; the last lines, as many as the reference has. The first kind that occurs is taken.
    Where the reference is a number, so is the answer: of an equation, what it comes to. Where the reference is JSON or
    there is none, the last JSON is read too; and without a reference the last paragraph instead of lines.

    Args:
        text: The rollout.
        reference: The right answer; None for tasks that have many and name none.
    """
    numeric = reference is not None and NUMBER.fullmatch(reference.strip())
    found = [one for one in (_read_number(text) if numeric else _read_text(text, reference)) if one is not None]
    # Some answers end in a period, most rollouts' sentences do.
    found += [one[:-1].rstrip(DECORATION) for one in found if one.endswith(".")]
    return list(dict.fromkeys(found)) or [None]


def _marked(text: str) -> str | None:
    """What stands in the last <answer> element, else in the last box."""
    element, boxes = _last_element(text), BOXED.findall(text)
    if element is not None or not boxes:
        return element
    words = WORDED.fullmatch(boxes[-1].strip())
    return words.group(1) if words else str(boxes[-1])


def _last_element(text: str) -> str | None:
    found, begun = None, None
    for tag in TAG.finditer(text):
        if not tag.group(1):
            begun = tag.end()
        elif begun is not None:
            found, begun = text[begun : tag.start()], None
    return found


def _after_statement(text: str) -> str | None:
    """The text from the last stated answer on."""
    places = [found.start(1) for found in STATED.finditer(text)]
    return text[places[-1] :] if places else None


# ---------------------------------------------------------------- numbers


def _read_number(text: str) -> list[str | None]:
    text = GROUPED.sub(",", text.translate(DASHES))
    marked = _marked(text)
    if marked is not None:
        return [_number_in(marked) or marked.strip(), _quotient_in(marked)]
    stated = _after_statement(text)
    if stated is not None:
        line = stated.splitlines()[0]
        number = _number_in(line)
        if number is not None:
            return [number, _quotient_in(line)]
    return [*_numbers(text)[-1:]]


def _number_in(statement: str) -> str | None:
    """The first number of a statement; of an equation, the first after its last equals sign."""
    return next(iter(_numbers(_result(statement))), None)


def _quotient_in(statement: str) -> str | None:
    """The quotient of two numbers, such as 1/4, that a statement's number is the first part of."""
    result = _result(statement)
    number = NUMBER.search(result)
    divisor = DIVISOR.match(result, number.end()) if number else None
    return f"{number.group()}/{divisor.group(1)}" if number and divisor else None


def _result(statement: str) -> str:
    """Without the reasons that follow, what an equation comes to; else the statement itself."""
    first = NUMBER.search(statement)
    aside = ASIDE.search(statement, first.end()) if first else None
    statement = statement[: aside.start()] if aside else statement
    right = statement.rpartition("=")[2]
    return right if NUMBER.search(right) else statement


def _numbers(text: str) -> list[str]:
    found = [number.replace(",", "") for number in NUMBER.findall(text)]
    return [re.sub(r"^(-?)\.", r"\g<1>0.", number) for number in found]


# ---------------------------------------------------------------- texts


def _read_text(text: str, reference: str | None) -> list[str | None]:
    marked, stated = _marked(text), _after_statement(text)
    wants_json = reference is None or _is_json(reference)
    if marked is not None:
        return [*_layouts(marked), _last_json(marked) if wants_json else None]
    block = _last_json(text if stated is None else stated) if wants_json else None
    if reference is None:
        return [block, *_last_paragraph(text, stated)]
    lines = len(reference.strip("\n").rstrip().splitlines())
    if lines > 1:
        after = "" if stated is None else "\n".join(_lines(stated)[:lines])
        return [block, *_last_lines(text, lines), after or None]
    last = stated if stated is not None else "\n".join(_last_lines(text, 1))
    return [block, *_sentence(last.splitlines()[0])] if last else [block]


def _sentence(line: str) -> list[str]:
    """What a line states, without markdown round it; and the line."""
    line = line.strip()
    return [BOLD_END.sub("", line).strip(DECORATION), line]


def _last_lines(text: str, number: int) -> list[str]:
    """The last lines of a text with their layout; and those that are not empty, without spaces round them."""
    lines = _lines(text.rstrip())
    filled = [line.strip() for line in lines if line.strip()]
    found = [lines[-number:], filled[-number:]] if number > 1 else [filled[-number:]]
    return ["\n".join(some) for some in found if some]


def _last_paragraph(text: str, stated: str | None) -> list[str]:
    """The paragraph that begins with what is stated, and its first line; else the last paragraph."""
    if stated is not None:
        return [*_sentence(stated.splitlines()[0]), *_layouts(_paragraphs(stated)[0])]
    return _layouts(_paragraphs(text)[-1]) if text.strip() else []


def _layouts(block: str) -> list[str]:
    """A block without what surrounds it; and with the spaces before its first line."""
    whole = "\n".join(_lines(block))
    return [whole.strip(), whole.strip("\n")]


def _lines(text: str) -> list[str]:
    """Lines without the spaces at their ends and without code fences."""
    lines = [line.rstrip() for line in text.splitlines() if not FENCE.fullmatch(line)]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def _is_json(reference: str) -> bool:
    return reference.lstrip().startswith(("[", "{")) and _last_json(reference) == reference.strip()


def _last_json(text: str) -> str | None:
    """The last list or object in JSON, however many lines it takes."""
    text, decoder = text[-JSON_CHARACTERS:], json.JSONDecoder()
    found, end = None, 0
    for bracket in re.finditer(r"[\[{]", text):
        if bracket.start() < end:
            continue
        try:
            _, end = decoder.raw_decode(text, bracket.start())
        except RecursionError:  # nested without end; every further bracket would take as long
            break
        except ValueError:
            continue
        found = text[bracket.start() : end]
    return found
