"""From prompts to rows of rollouts: ids, seeds, truncation and answers as they were."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
import torch
from tiny import prompts, scored, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rocktokens.errors import DataError
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.rollouts import RolloutRows, check_lengths, requests_for, sample_rollouts
from rocktokens.sample.sampler import Sampler
from rocktokens.sample.settings import RolloutConfig
from rocktokens.score.scoring import Rollout
from rocktokens.seeds import derive_seed
from rocktokens.tables import ROLLOUTS

CONFIG = RolloutConfig(num_rollouts=3, max_new_tokens=8, seed=5)


def asked(count: int = 4, answer: str | None = "w7") -> list[Prompt]:
    return [Prompt(f"p{number}", ids, "", answer) for number, ids in enumerate(prompts(count))]


def engine(model=None) -> Sampler:
    return Sampler(model or tiny_model(), eos_ids=(1,), pad_id=2)


def sampled(questions, config=CONFIG, checker=None, model=None) -> list[dict]:
    table = sample_rollouts(engine(model), questions, config, tiny_tokenizer(), checker)
    return table.cast(ROLLOUTS).to_pylist()


def test_rows_hold_what_was_drawn():
    rows = sampled(asked())
    assert [row["rollout_id"] for row in rows] == [f"p{prompt}#{number}" for prompt in range(4) for number in range(3)]
    answers = engine().generate(requests_for(asked(), CONFIG))
    for row, answer in zip(rows, answers):
        assert tuple(row["token_ids"]) == answer.token_ids
        assert row["truncated"] == answer.truncated
        assert row["seed"] == derive_seed(5, row["prompt_id"], int(row["rollout_id"].split("#")[1]))
        assert row["text"] == tiny_tokenizer().decode(answer.token_ids, skip_special_tokens=True)
    assert len({row["seed"] for row in rows}) == 12


def test_more_prompts_or_rollouts_change_none_of_those_there_were():
    def drawn(count: int, config: RolloutConfig = CONFIG) -> set:
        return {(row["rollout_id"], tuple(row["token_ids"])) for row in sampled(asked(4)[:count], config)}

    more_rollouts = RolloutConfig(num_rollouts=5, max_new_tokens=8, seed=5)
    assert drawn(4) > drawn(2) < drawn(2, more_rollouts)


def test_answers_are_checked_on_the_text_and_null_where_nothing_can_be():
    rows = sampled(asked(), checker=lambda text, answer: answer in text.split())
    for row in rows:
        assert row["correct"] == ("w7" in row["text"].split())
    assert all(row["correct"] is None for row in sampled(asked()))
    assert all(row["correct"] is None for row in sampled(asked(answer=None), checker=lambda text, answer: True))


def test_a_broken_model_is_named_with_the_first_rollout():
    model = tiny_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(math.nan)
    with pytest.raises(DataError, match="NaN or infinite logits on every prompt"):
        sampled(asked(), model=model)


def test_one_broken_rollout_is_kept_as_a_row_and_not_scored():
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[63] = math.nan
    questions = [Prompt("good", (3, 4), "", None), Prompt("bad", (3, 63), "", None)]
    table = sample_rollouts(engine(model), questions, CONFIG, tiny_tokenizer(), None)
    assert len(table) == 6
    assert [rollout.prompt_id for rollout in RolloutRows(table)] == ["good"] * 3


def test_prompts_longer_than_the_context_are_named():
    questions = [Prompt("short", (3,), "", None), Prompt("long", (3,) * 96, "", None)]
    with pytest.raises(DataError, match=r"1 of 2 prompts do not fit .* 96 tokens; the first is long with 96"):
        check_lengths(questions, 96)
    check_lengths(questions[:1], 96)
    check_lengths(questions, None)


def test_rollouts_of_a_table_are_made_when_they_are_asked_for():
    rows = [
        {"prompt_id": f"p{i}", "rollout_id": f"p{i}#0", "prompt_ids": [3, i], "token_ids": [] if i == 2 else [i, i + 1]}
        for i in range(600)
    ]
    found = RolloutRows(pa.Table.from_pylist(rows))
    every = list(found)
    assert len(found) == len(every) == 599  # one has no tokens
    assert every[2:3] == found[2:3] == [Rollout("p3", "p3#0", (3, 3), (3, 4))]
    assert found[590:700] == every[590:]
    assert found[10:3] == []


def test_text_is_not_tokenised_again_between_sampler_and_scorer():
    """Ids that no tokenizer would make from the text they decode to reach the scorer as they were drawn."""
    pieces = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2, "<eos>": 3}, [("a", "b")], fuse_unk=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<eos>", pad_token="<eos>")
    student, teacher = tiny_model(vocabulary=4), tiny_model(vocabulary=4, seed=1)
    sampler = Sampler(student, eos_ids=(3,), pad_id=3)
    config = RolloutConfig(num_rollouts=20, max_new_tokens=10)
    table = sample_rollouts(sampler, [Prompt("p", (0,), "a", None)], config, tokenizer, None)
    assert any(tokenizer(row["text"])["input_ids"] != row["token_ids"] for row in table.to_pylist())
    rows = scored(RolloutRows(table), student, teacher, eos_ids=(3,), vocabulary=4).to_pylist()
    found = {(row["rollout_id"], row["position"]): row["token_id"] for row in rows}
    drawn = {row["rollout_id"]: row["token_ids"] for row in table.to_pylist()}
    assert found == {(name, place): token for name, ids in drawn.items() for place, token in enumerate(ids)}
