"""Runs one command in several processes that share a run, forked from this one, which loads the libraries once.

    ROCKTOKENS_WORLD=3 python tests/helpers/forked_ranks.py PREPARE.py WORDS...    the words after `rocktokens`

Every process runs PREPARE.py first, which may count or replace what the test looks at, and knows its rank by then.
Ends with the largest exit status of all.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback

import rocktokens.lm.training.distill  # noqa: F401 - loaded once, before the first fork
from rocktokens.cli import main
from rocktokens.runs import ranks


def start(rank: int, script: str, words: list[str]) -> int:
    """Fork a process with this rank; returns its id."""
    sys.stdout.flush()
    number = os.fork()
    if number:
        return number
    os.environ[ranks.RANK] = str(rank)
    status = 70
    try:
        runpy.run_path(script, run_name="prepare")
        main(words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    ranks._parent = os.getpid()  # a worker ends when the process that started it has ended
    started = [start(rank, sys.argv[1], sys.argv[2:]) for rank in range(int(os.environ[ranks.WORLD]))]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in started))
