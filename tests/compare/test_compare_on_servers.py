"""Comparisons and studies with servers: refused before anything is trained; started over where that is asked for."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import tiny
from standin_server import StandIn

from rocktokens.compare.settings import CompareConfig
from rocktokens.compare.stage import compare
from rocktokens.errors import ConfigError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import open_run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.sample.stage import sample
from rocktokens.servers.settings import ServersConfig
from rocktokens.stage import pair_of, prompts_of
from rocktokens.study import StudyConfig, require_servers, study
from rocktokens.train.settings import DistillConfig
from rocktokens.train.stage import distill

STUDENT, TEACHER = tiny.tiny_model(seed=5), tiny.tiny_model("qwen3", seed=6, width=48)
TRAINED = DistillConfig(steps=2, prompts_per_step=4, rollouts_per_prompt=2, max_new_tokens=8, keep=1)
ASKED = CompareConfig(
    regimes=("uniform", "freeze_rocks"), rocks=(5, 6), seeds=1, evaluations=1, problems=4, rollouts=1, contexts=60,
    resamples=100,
)  # fmt: skip


@pytest.fixture(scope="module")
def distilled(tmp_path_factory) -> Path:
    """A run that was distilled without servers."""
    home = tmp_path_factory.mktemp("distilled")
    paths = [tiny.save_model(home / name, model) for name, model in (("student", STUDENT), ("teacher", TEACHER))]
    texts = [" ".join(f"w{token}" for token in ids) for ids in tiny.prompts(30, seed=3, shortest=3)]
    file = home / "p.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text, "answer": "w9"}) for text in texts))
    prompts = PromptsConfig(source=str(file), checker="regex", pattern=r"(w\d+)")
    pair = PairConfig(student=paths[0], teacher=paths[1])
    distill(home / "run", pair, prompts, TRAINED, problems=4)
    return home / "run"


@pytest.fixture
def run(distilled, tmp_path) -> Path:
    return Path(shutil.copytree(distilled, tmp_path / "run"))


def test_a_context_too_short_for_the_held_out_rollouts_is_refused_before_anything_is_trained(run):
    """Prompts of at most 14 tokens are trained with 8 more; the run's own rollouts are longer."""
    pair, prompts = PairConfig(), PromptsConfig()
    sample(run, pair, prompts, RolloutConfig(num_rollouts=2, max_new_tokens=40))
    longest = max(
        len(row["prompt_ids"]) + len(row["token_ids"]) for row in open_run(run).read("rollouts").to_pylist()[:60]
    )
    assert longest > 30
    with StandIn(TEACHER, pooling=True, context=24) as short:
        with pytest.raises(ConfigError, match="--max-model-len") as error:
            compare(run, ASKED, servers=ServersConfig(teacher=(short.url,)))
        assert short.url in str(error.value)
    assert not list(run.glob("compare/*/seed=*"))


def test_a_study_asks_the_servers_of_its_later_stages_before_the_first(distilled, tmp_path, unused_port):
    """Dead ones are refused by their URL; the model that they serve need not be the trained one yet."""
    run, nobody = open_run(distilled), f"http://127.0.0.1:{unused_port}"
    asked = StudyConfig(
        path=tmp_path / "run", pair=pair_of(run), prompts=prompts_of(run), distill=TRAINED,
        rollouts=RolloutConfig(num_rollouts=1, max_new_tokens=8),
    )  # fmt: skip
    for stages, urls in (
        (("distill", "sample"), {"student": (nobody,)}),
        (("distill", "knockout"), {"student": (nobody,)}),
        (("sample", "score"), {"teacher": (nobody,)}),
    ):
        config = dataclasses.replace(asked, stages=stages, servers=ServersConfig(**urls))
        with pytest.raises(ConfigError, match=f"nobody answers at {nobody}"):
            study(config)
        assert not asked.path.exists()
    shutil.copytree(distilled, asked.path)
    for stages in (("distill",), ("distill", "detect")):  # these do not ask a student
        config = dataclasses.replace(asked, stages=stages, servers=ServersConfig(student=(nobody,)))
        require_servers(config)
    with StandIn(tiny.tiny_model(seed=99)) as other:
        servers = ServersConfig(student=(other.url,), teacher=(nobody,))
        require_servers(dataclasses.replace(asked, stages=("distill", "sample", "knockout"), servers=servers))
        assert not other.requests
