"""What stages do alike where several processes or servers work for them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rocktokens.errors import RunError
from rocktokens.ranks import has_sign, ranks, sign, wait_for
from rocktokens.run import MANIFEST

if TYPE_CHECKING:
    from rocktokens.servers.connect import Sampling
    from rocktokens.servers.identity import Fingerprint
    from rocktokens.stage import Parts

log = logging.getLogger(__name__)

SERVED, TEACHER_SERVED = "served-by", "teacher-served-by"


def wait_for_run(path: Path) -> None:
    """Processes other than the first open the run that the first has made."""
    if not ranks().is_first:
        wait_for((path / MANIFEST).exists, f"a run in {path}")


def same_server(parts: Parts, sampling: Sampling, teacher: Sampling | None = None, *, again: bool = False) -> None:
    """Refuse to add to finished parts with other served models than those that made them.

    Args:
        parts: the finished parts.
        sampling: the model that samples.
        teacher: the teacher beside it, where both are served.
        again: throw the parts of another model away instead.
    """
    both = {SERVED: sampling, TEACHER_SERVED: teacher}
    urls = {name: list(own.urls) for name, own in both.items() if own is not None}
    served = {name: own.served for name, own in both.items() if own is not None and own.served is not None}
    if again and served:
        _start_over(parts, served)
    for name, now in served.items():
        same_model(parts, now, urls[name], name)


def same_model(parts: Parts, now: Fingerprint, urls: list[str], name: str = SERVED, *, again: bool = False) -> None:
    """The same for any fingerprint; the first process keeps it beside the parts."""
    from rocktokens.servers.identity import check_same

    if again:
        _start_over(parts, {name: now})
    check_same(now, _fingerprint(parts.keep(name, lambda: pa.table({"fingerprint": [now.text()]}))), urls)


def _start_over(parts: Parts, served: dict[str, Fingerprint]) -> None:
    """The first process removes parts of other models; the others wait until it has looked."""
    looked = f"looked-{parts.name.replace('/', '-')}"
    if not ranks().is_first:
        return wait_for(lambda: has_sign(parts.run.path, looked), "the first process's look at the finished parts")
    if any(other_model(parts, now, name) for name, now in served.items()):
        log.info("another model is served than when this stage began: it starts over")
        parts.remove()
    sign(parts.run.path, looked)


def other_model(parts: Parts, now: Fingerprint, name: str = SERVED) -> bool:
    """Whether the finished parts are another model's, or damaged."""
    from rocktokens.servers.identity import check_same

    try:
        before = served_before(parts, name)
        if before is not None:
            check_same(now, before, [])
    except RunError:
        return True
    return False


def served_before(parts: Parts, name: str = SERVED, *, again: bool = False) -> Fingerprint | None:
    """What was served when the finished parts were made; None where there are none, or the model was in a process.

    With `again` None, too: another model may be served, and `same_server` throws the parts of the first away.
    """
    return _fingerprint(parts.wait(name)) if parts.has(name) and not again else None


def _fingerprint(kept: pa.Table) -> Fingerprint:
    from rocktokens.servers.identity import Fingerprint

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
