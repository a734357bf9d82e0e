"""A process that compares answers: one JSON line in (text, answer), one out (how it was decided, whether it is right).

Started by lm/answer_pool.py as `python -m rocktokens.prompts.answer_worker`; it ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Answer every line until there are no more."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no reply
    from rocktokens.prompts.checkers import MathChecker

    checker = MathChecker()
    for line in sys.stdin:
        text, answer = json.loads(line)
        how, right = checker.decide(text, answer)
        replies.write(json.dumps([how, right]) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
