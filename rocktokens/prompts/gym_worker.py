"""A process that makes problems of reasoning-gym, one per request; both directions are pickles over its own pipes.

Started by prompts/gym_process.py as `python -m rocktokens.prompts.gym_worker` with a fixed PYTHONHASHSEED: some tasks
follow the order of sets, some draw from Python's shared random numbers. It ends when its input does, or when nobody
asks for long.
"""

from __future__ import annotations

import os
import pickle
import queue
import random
import signal
import sys
import threading
from typing import BinaryIO

IDLE_SECONDS = 120.0  # then it frees its memory; who needs it again starts another
Request = tuple[str, dict[str, object], int, int, int]
"""Task, its settings, seed and number of problems of a block, and which of them."""
Reply = tuple[dict[str, object] | None, str]
"""The problem; or None, and what the task said."""


def main() -> None:
    """Answer every request."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what tasks print is no reply
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, requests), daemon=True).start()
    maker = _Maker()
    while True:
        try:
            request = requests.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            return
        pickle.dump(maker.reply(request), replies)
        replies.flush()


def _read(source: BinaryIO, requests: queue.SimpleQueue[Request]) -> None:
    """Pass requests on; without anybody to ask, end at once, also in the middle of a problem that takes for ever."""
    while True:
        try:
            requests.put(pickle.load(source))
        except (EOFError, OSError):
            os._exit(0)


class _Maker:
    """Makes problems; remembers the block that was asked for last."""

    def __init__(self) -> None:
        self._block: object = None
        self._dataset: object = None

    def reply(self, request: Request) -> Reply:
        import numpy as np
        import reasoning_gym

        name, settings, seed, size, number = request
        try:
            if self._block != request[:-1]:
                self._dataset = reasoning_gym.create_dataset(name, seed=seed, size=size, **settings)
                self._block = request[:-1]
            # Some tasks draw from these instead of their own; a problem must not depend on those made before it.
            random.seed(f"{seed}/{number}")
            np.random.seed((seed + number) % 2**32)
            return dict(self._dataset[number]), ""  # type: ignore[index]
        except Exception as error:  # a task may raise anything over settings that it did not check
            return None, str(error)


if __name__ == "__main__":
    main()
