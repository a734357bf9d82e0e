"""How the work of a study divides over its stages, guessed from its settings before anything runs.

Good enough for a bar and for “about”: the display scales it by the pace it sees. The unit is one rollout sampled from
the student; the factors are what other work cost in that unit on the built-in world, measured on two cores.
"""

from __future__ import annotations

from collections.abc import Collection

from rocktokens.study_settings import StudyConfig

TRAINED = 2.5  # a rollout sampled, scored by the teacher and learned from
SCORED = 0.5  # a rollout under one more checkpoint
BANNED = 0.2  # a knock-out of one rollout: most are copied, the others resumed midway
GRAFTED = 35.0  # a prompt in every arm of a graft
DETECTED, REPORTED = 1000.0, 2500.0  # hardly depend on the settings


def expected(config: StudyConfig, complete: Collection[str] = ()) -> dict[str, float]:
    """Stage → how much of the work it is expected to be, in sampled rollouts; next to nothing if it is complete."""
    distill, compare = config.distill, config.compare
    trained = TRAINED * distill.prompts_per_step * distill.rollouts_per_prompt
    sampled = (config.detection_prompts or config.prompts.limit or 0) * config.rollouts.num_rollouts
    arms = len({"uniform", *compare.regimes}) * compare.seeds
    readings = compare.problems * (compare.evaluations * compare.curve_rollouts + compare.rollouts)
    checked = config.problems * distill.evaluate_rollouts * distill.steps / (distill.evaluate_every or distill.steps)
    baseline = config.baseline.problems * config.baseline.rollouts
    work: dict[str, float] = {
        "distill": trained * distill.steps + checked + (distill.off_policy.answers or 0) * distill.off_policy.epochs,
        "sample": sampled,
        "score": SCORED * sampled * (distill.keep + 1),
        "detect": DETECTED,
        "geometry": 1.0,
        "knockout": baseline * (1 + BANNED * config.knockout.top),
        "graft": GRAFTED * min(config.graft.problems, config.baseline.problems),
        "bypass": 1.0,
        "compare": arms * (trained * (compare.steps or distill.steps) + readings),
        "report": REPORTED,
    }
    return {stage: 1.0 if stage in complete else work[stage] for stage in work if stage in config.stages}
