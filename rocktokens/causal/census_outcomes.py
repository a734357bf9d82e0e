"""`census --outcomes`: verdicts from anybody's knock-out outcomes; nothing is sampled and no model is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

from rocktokens.causal.census_report import census_facts, census_table
from rocktokens.causal.correlates import PREDICTORS, correlate
from rocktokens.causal.knockout_stage import predictors_of
from rocktokens.causal.knockout_terminal import render
from rocktokens.causal.outcomes import census_of_outcomes
from rocktokens.causal.settings import KnockoutConfig
from rocktokens.detect.detect_counts import refuse_other_runs
from rocktokens.files import digest
from rocktokens.interop.measured import read_outcomes
from rocktokens.lock import working_on
from rocktokens.progress import console
from rocktokens.run import Run
from rocktokens.stage import Stage

log = logging.getLogger(__name__)


def census_outcomes(outcomes: Path, out: Path, config: KnockoutConfig, *, again: bool = False) -> Run:
    """Δ, interval, verdict and power of every candidate of a file.

    Args:
        outcomes: CSV or Parquet with candidate, prompt (or problem), baseline and knocked_out.
        out: directory of the new run; one that holds the types of `detect --counts` may be named again.
        config: epsilon, alpha, power and resamples are used.
        again: whether to write anew although the stage is complete.
    """
    read = read_outcomes(outcomes)
    with working_on(out):
        refuse_other_runs(out)
        run = Run.create(out, {})
        settings = {"knockout": config, "outcomes": {"source": str(outcomes)}}
        stage = Stage(run, "knockout", settings, {"outcomes": digest(outcomes)})
        if stage.due(again):
            census = census_of_outcomes(read, config)
            for note in census.notes:
                log.warning("%s", note)
            predictors = predictors_of(run)
            correlations = correlate(census, predictors)
            missing = [name for name in PREDICTORS if name not in predictors]
            facts = {**census_facts(census, correlations, missing), "source": "outcomes"}
            stage.publish({"census": census_table(census, predictors)}, facts)
            console().print(render(census, correlations))
        return run
