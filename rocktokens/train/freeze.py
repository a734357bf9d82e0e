"""Token types without loss in a stock TRL trainer, for those who keep their own subclass of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from trl import DistillationTrainer

from rocktokens.run import Run
from rocktokens.settings import require
from rocktokens.train.describe import token_ids_of
from rocktokens.train.trainer import RockDistillationTrainer
from rocktokens.values import Batch


class freeze:
    """Leave token types out of the training loss of a `trl.DistillationTrainer`: one call, or a `with` block.

        rocktokens.freeze(trainer, [11, 42])          # from now on
        with rocktokens.freeze(trainer, "runs/mine"): # the run's bypass list, inside the block
            trainer.train()

    Where such a token is predicted, the position counts 0. TRL has counted the tokens of the step before, so the loss
    is divided by all of them, as with `normalise="all"`. Evaluation still counts every token.

    Args:
        trainer: A stock trainer or a subclass of it; ours takes a `selector`.
        ids: Token ids, token texts, a bypass.json, or a run: its bypass list where it has one, else its rocks.
    """

    def __init__(self, trainer: DistillationTrainer, ids: Run | str | Path | Iterable[int | str]) -> None:
        ours = isinstance(trainer, RockDistillationTrainer)
        require(not ours, "this trainer weighs tokens itself: pass selector='freeze' and rocks to it")
        require(
            isinstance(trainer, DistillationTrainer), f"freeze takes TRL's DistillationTrainer, got {type(trainer)}"
        )
        self.trainer: Any = trainer
        self.ids = token_ids_of(ids, self.trainer._tokenizer, skips=True)
        self._before = trainer.__dict__.get("_generate_and_score_completions")
        generate = self.trainer._generate_and_score_completions

        def masked(inputs: list[Batch]) -> Batch:
            output = generate(inputs)
            if self.trainer.model.training:
                token_BC = output["completion_ids"]
                kept_BC = ~torch.isin(token_BC, torch.tensor(self.ids, dtype=token_BC.dtype, device=token_BC.device))
                given_BC = output.get("tool_mask")  # 0 where a tool wrote
                output["tool_mask"] = kept_BC.long() if given_BC is None else given_BC * kept_BC
            return output

        self.trainer.__dict__["_generate_and_score_completions"] = masked

    def __enter__(self) -> freeze:
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del self.trainer._generate_and_score_completions
        else:
            self.trainer._generate_and_score_completions = self._before
