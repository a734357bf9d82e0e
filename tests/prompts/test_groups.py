"""Groups of prompts: by a column, by equal texts, and by both; stored with the rollouts."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import rocktokens.check as checks
from rocktokens.errors import DataError
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import load_prompts
from rocktokens.run import Run
from rocktokens.sample.requests import Continuation
from rocktokens.sample.rollouts import rollout_row
from rocktokens.world import get_world


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(get_world("arithmetic").student_path)


def written(path, *pairs):
    lines = [json.dumps({"prompt": text, "template": group}) for text, group in pairs]
    (path / "p.jsonl").write_text("\n".join(lines))
    return str(path / "p.jsonl")


def test_equal_texts_and_a_column_make_groups(tmp_path, tokenizer):
    own = ("Ana has", 1), ("Ben has", 1), ("Ana has", 2), ("Cem has", 2), ("Dan has", 3)
    source = written(tmp_path, *own)
    plain = load_prompts(PromptsConfig(source=source), tokenizer)
    assert [prompt.group_id for prompt in plain] == ["p/1", None, "p/1", None, None]
    grouped = load_prompts(PromptsConfig(source=source, group_field="template"), tokenizer)
    assert [prompt.group_id for prompt in grouped] == ["1", "1", "1", "1", "3"]  # one text links 1 and 2
    with pytest.raises(DataError, match="no group in column 'theme'"):
        load_prompts(PromptsConfig(source=source, group_field="theme"), tokenizer)


def test_a_run_says_the_group_of_every_prompt(tmp_path, tokenizer):
    source = written(tmp_path, ("Ana has", 1), ("Ben has", 1), ("Ana has", 1))
    prompts = load_prompts(PromptsConfig(source=source), tokenizer)
    made = [rollout_row(p, 0, 0, Continuation((1,), False), text="", correct=None) for p in prompts]
    run = Run.create(tmp_path / "run", {})
    run.write("rollouts", pa.Table.from_pylist(made))
    assert run.groups() == {"p/1": "p/1", "p/2": "p/2", "p/3": "p/1"}
    older = run.read("rollouts").drop_columns(["group_id"])
    pq.write_table(older, run.path / "rollouts.parquet")  # of a version without groups
    assert set(run.groups().items()) == {(name, name) for name in ("p/1", "p/2", "p/3")}


def test_check_counts_near_copies(tmp_path, tokenizer):
    texts = [(f"Ana has {number} and {name}", name) for number in (3, 17) for name in ("Ben", "Cem", "Dan")]
    source = written(tmp_path, *texts)
    found = checks.near_copies(load_prompts(PromptsConfig(source=source), tokenizer))
    assert (found.status, found.number) == ("note", "6 of 6, in 3 templates")
    assert "--prompts.group-field" in found.remedy
    grouped = load_prompts(PromptsConfig(source=source, group_field="template"), tokenizer)
    assert checks.near_copies(grouped).status == "fine"
