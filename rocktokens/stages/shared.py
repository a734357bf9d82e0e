"""What stages do alike where several processes or servers work for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rocktokens.runs.ranks import has_sign, ranks, sign, wait_for
from rocktokens.runs.store import MANIFEST

if TYPE_CHECKING:
    from rocktokens.engines.connect import Sampling
    from rocktokens.engines.identity import Fingerprint
    from rocktokens.stages.stage import Parts

SERVED = "served-by"


def wait_for_run(path: Path) -> None:
    """Processes other than the first open the run that the first has made."""
    if not ranks().is_first:
        wait_for((path / MANIFEST).exists, f"a run in {path}")


def same_server(parts: Parts, sampling: Sampling, name: str = SERVED) -> None:
    """Refuse to add to finished parts with another served model than the one that made them."""
    if sampling.served is not None:
        same_model(parts, sampling.served, list(sampling.urls), name)


def same_model(parts: Parts, now: Fingerprint, urls: list[str], name: str = SERVED) -> None:
    """The same for any fingerprint; the first process keeps it beside the parts."""
    from rocktokens.engines.identity import check_same

    check_same(now, _fingerprint(parts.keep(name, lambda: pa.table({"fingerprint": [now.text()]}))), urls)


def served_before(parts: Parts, name: str = SERVED) -> Fingerprint | None:
    """What was served when the finished parts were made; None where there are none, or the model was in a process."""
    return _fingerprint(parts.wait(name)) if parts.has(name) else None


def _fingerprint(kept: pa.Table) -> Fingerprint:
    from rocktokens.engines.identity import Fingerprint

    return Fingerprint.of_text(kept["fingerprint"][0].as_py())


def served_facts(sampling: Sampling) -> dict[str, object]:
    """For the manifest: what was served; nothing where the model was in this process."""
    return {} if sampling.served is None else {"served": sampling.served.root or ", ".join(sampling.urls)}


def together(path: Path, name: str) -> None:
    """Between two stages: processes other than the first wait until the first has come here."""
    if ranks().is_first:
        sign(path, name)
    else:
        wait_for(lambda: has_sign(path, name), name)
