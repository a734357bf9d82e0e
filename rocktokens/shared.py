"""What stages do alike where several processes or servers work for them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from rocktokens.ranks import has_sign, ranks, sign, wait_for
from rocktokens.run import MANIFEST

if TYPE_CHECKING:
    from rocktokens.servers.connect import Sampling

log = logging.getLogger(__name__)


def wait_for_run(path: Path) -> None:
    """Processes other than the first open the run that the first has made."""
    if not ranks().is_first:
        wait_for((path / MANIFEST).exists, f"a run in {path}")


def served_facts(sampling: Sampling) -> dict[str, object]:
    """For the manifest: what was served; nothing where the model was in this process."""
    return {} if sampling.served is None else {"served": sampling.served}


def together(path: Path, name: str) -> None:
    """Between two stages: processes other than the first wait until the first has come here."""
    if ranks().is_first:
        sign(path, name)
    else:
        wait_for(lambda: has_sign(path, name), name)
