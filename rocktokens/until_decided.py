"""More prompts until every costly type is decided: `study --detect.until-decided`, within a budget of prompts.

Detection says how many prompts would settle what is unclear; this stage samples and scores so many and asks again. Each
look tests at a share of q (`DetectConfig.q_of_a_look`), so looking several times does not add false rocks.
"""

from __future__ import annotations

import logging

from rocktokens.ranks import alone, has_sign, sign, signs, wait_for
from rocktokens.run import MANIFEST, open_run
from rocktokens.shared import together
from rocktokens.study_settings import StudyConfig
from rocktokens.values import Json

log = logging.getLogger(__name__)

LOOK = "look-"
"""Signs of the first process: number of the look and prompts in all."""


def prompts_for_detection(config: StudyConfig) -> int | None:
    """Prompts to sample: those of the last look where prompts were added, else the study's own number."""
    if not config.detect.until_decided or not (config.path / MANIFEST).exists():
        return config.detection_prompts
    run = open_run(config.path)
    looked = run.facts("detect") if run.done("detect") else {}
    return max(config.detection_prompts or 0, looked.get("prompts_asked") or 0) or None


def until_decided(config: StudyConfig) -> None:
    """After a first look: add prompts and look again while something is unclear, in reach and within the budget.

    Sampling and scoring of the added prompts are shared out among the processes; detection is the first one's.
    """
    from rocktokens.detect import stage as detect

    path = config.path
    while True:
        facts = open_run(path).facts("detect")
        asked = next_prompts(facts, config)
        if asked is None:
            return
        look = facts.get("look", 1) + 1
        log.info("look %d of %d: %d prompts", look, config.detect.looks, asked)
        before = facts["num_prompts"]
        sign(path, f"{LOOK}{look}-{asked}")
        _add_prompts(config, look, asked)
        with alone():
            run = detect.detect(path, config.detect, again=True)
        found = run.facts("detect")
        run.finish("detect", {**found, "look": look, "prompts_asked": asked})
        if found["num_prompts"] <= before:
            log.info("the source has no more than %d prompts for detection; what is unclear stays so", before)
            return


def follow_looks(config: StudyConfig, end: str) -> None:
    """What the other processes do: their share of every look that the first one announces, until it gives the sign."""
    path, done = config.path, set[str]()

    def announced() -> list[str]:
        return sorted(set(signs(path, LOOK)) - done)

    while True:
        wait_for(lambda: has_sign(path, end) or bool(announced()), "a decision whether to add prompts")
        if has_sign(path, end):
            return
        name = announced()[0]
        done.add(name)
        look, asked = name.removeprefix(LOOK).split("-")
        _add_prompts(config, int(look), int(asked))


def _add_prompts(config: StudyConfig, look: int, asked: int) -> None:
    """Sample and score so many prompts in all; every process its share."""
    from rocktokens.sample import stage as sample
    from rocktokens.score import stage as score

    path = config.path
    sample.sample(path, config.pair, config.prompts, config.rollouts, limit=asked, servers=config.servers, again=True)
    together(path, f"sampled-for-look-{look}")
    score.score(path, config.score, servers=config.servers, again=True)
    together(path, f"scored-for-look-{look}")


def next_prompts(facts: Json, config: StudyConfig) -> int | None:
    """How many prompts the next look needs; None where nothing is left to settle, to spend or to look."""
    settings, needed, there = config.detect, facts["enough"]["prompts_needed"], facts["num_prompts"]
    if needed is None:
        log.info("no costly type is unclear that more prompts would settle")
        return None
    if there >= settings.budget_prompts:
        log.info("%d types stay unclear: the budget of %d prompts is used up", facts["enough"]["num_unclear"], there)
        return None
    if facts.get("look", 1) >= settings.looks:
        log.info("%d types stay unclear after %d looks", facts["enough"]["num_unclear"], settings.looks)
        return None
    return min(int(needed), settings.budget_prompts)
