"""What every token type has cost so far, kept while a model trains: O(V) memory, no scoring pass, any training loop.

Every statistic is a sum, so that monitors of several processes merge by addition. Four windows are kept for each type:
`total` (everything), `early` (the first updates), `recent` (exponentially forgotten) and `late` (the same, without the
rows of `early`: the two are independent, so a fall from one to the other is not blurred by rows that both hold). This
module does not know where the losses come from, nor what is done with the answer.

Shapes: N rows of one update, V vocabulary, W = 4 windows.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from scipy import stats as sps
from torch import Tensor

from rocktokens.errors import DataError
from rocktokens.settings import require
from rocktokens.values import Row

WINDOWS = ("total", "early", "recent", "late")
# Sums kept for every type in every window. weight_sq gives the effective number of rows behind a decayed mean.
SUMS = ("weight", "weight_sq", "value", "value_sq", "grad_norm")
VERSION = 2
HALF_LIFE = 50.0  # updates
LEAST_ROWS = 20  # effective rows below which a type's mean and variance say too little


class TokenMonitor:
    """Per-type count, mean, variance and recent mean of a per-token loss.

    >>> monitor = TokenMonitor(vocabulary=50_000)
    >>> monitor.update(token_N, loss_N)        # once an optimiser step, or once a micro-batch
    >>> monitor.table()                        # one row per token type seen
    >>> monitor.rocks()                        # the online form of detection; often none
    """

    def __init__(self, vocabulary: int, *, half_life: float = HALF_LIFE) -> None:
        """`half_life`: updates after which a row's weight in the recent mean is halved; also the early window."""
        require(half_life > 0, f"half_life must be > 0 updates, got {half_life}")
        self.vocabulary, self.half_life = vocabulary, float(half_life)
        self.num_updates = 0
        self._sums_WSV = torch.zeros((len(WINDOWS), len(SUMS), vocabulary), dtype=torch.float64)

    def update(self, token_N: Tensor, value_N: Tensor, grad_norm_N: Tensor | None = None) -> None:
        """Add one step's tokens. Rows whose value is not finite are left out."""
        token_N, value_N = torch.as_tensor(token_N).detach(), torch.as_tensor(value_N).detach()
        norm_N = torch.zeros_like(value_N) if grad_norm_N is None else torch.as_tensor(grad_norm_N).detach()
        if not token_N.shape == value_N.shape == norm_N.shape or token_N.dim() != 1:
            shapes = ", ".join(str(tuple(given.shape)) for given in (token_N, value_N, norm_N))
            raise DataError(f"tokens, values and gradient norms must be of one length each, got {shapes}")
        if len(token_N) and not (int(token_N.min()) >= 0 and int(token_N.max()) < self.vocabulary):
            found = f"{int(token_N.min())} to {int(token_N.max())}"
            raise DataError(f"token ids must lie in [0, {self.vocabulary}), got {found}")
        decay = 0.5 ** (1 / self.half_life)
        for window in ("recent", "late"):
            sums_SV = self._sums_WSV[WINDOWS.index(window)]
            sums_SV *= decay
            sums_SV[SUMS.index("weight_sq")] *= decay
        self.num_updates += 1

        finite_N = torch.isfinite(value_N)  # rows of weight 0 are NaN
        token_N, value_N, norm_N = token_N[finite_N], value_N[finite_N], norm_N[finite_N]
        type_U, index_N = token_N.unique(return_inverse=True)
        value_N, norm_N = value_N.double(), norm_N.double()
        ones_N = torch.ones_like(value_N)
        rows_SN = torch.stack([ones_N, ones_N, value_N, value_N.square(), norm_N])
        sums_SU = torch.zeros((len(SUMS), len(type_U)), dtype=torch.float64, device=value_N.device)
        sums_SU.index_add_(1, index_N, rows_SN)
        type_U, sums_SU = type_U.cpu(), sums_SU.cpu()
        in_early = self.num_updates <= self.half_life
        for place, counts in enumerate((True, in_early, True, not in_early)):
            if counts:
                self._sums_WSV[place].index_add_(1, type_U, sums_SU)

    def merge(self, other: TokenMonitor) -> TokenMonitor:
        """A monitor that has seen what both have; they must have run side by side (processes of one training run)."""
        merged = TokenMonitor(self.vocabulary, half_life=self.half_life)
        merged._sums_WSV = self._sums_WSV + other._sums_WSV
        merged.num_updates = max(self.num_updates, other.num_updates)
        return merged

    def gathered(self) -> TokenMonitor:
        """The sum over all processes of the running process group; a copy of itself where there is none."""
        merged = self.merge(TokenMonitor(self.vocabulary, half_life=self.half_life))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            nccl = torch.distributed.get_backend() == "nccl"
            sums_WSV = merged._sums_WSV.cuda() if nccl else merged._sums_WSV
            torch.distributed.all_reduce(sums_WSV)
            merged._sums_WSV = sums_WSV.cpu()
        return merged

    def mean(self, window: str = "total") -> np.ndarray:
        """Mean loss of every type in a window; NaN where the type has not occurred."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.sums(window, "value") / self.sums(window, "weight")

    def variance(self, window: str = "total") -> np.ndarray:
        """Unbiased variance of every type's loss in a window; NaN below two (effective) rows."""
        weight_V, mean_V = self.sums(window, "weight"), self.mean(window)
        rows_V = self.effective_rows(window)
        with np.errstate(invalid="ignore", divide="ignore"):
            spread_V = np.maximum(self.sums(window, "value_sq") / weight_V - mean_V**2, 0.0)
            return np.where(rows_V > 1 + 1e-9, spread_V * rows_V / (rows_V - 1), np.nan)

    def effective_rows(self, window: str = "total") -> np.ndarray:
        """Rows behind a mean; for the recent window, the number of equally weighted rows it is worth."""
        weight_V, square_V = self.sums(window, "weight"), self.sums(window, "weight_sq")
        return np.divide(weight_V**2, square_V, out=np.zeros_like(weight_V), where=square_V > 0)

    def sums(self, window: str, name: str) -> np.ndarray:
        """One of the kept sums for every type, e.g. ("recent", "weight"); see WINDOWS and SUMS."""
        return self._sums_WSV[WINDOWS.index(window), SUMS.index(name)].numpy()

    @property
    def count(self) -> np.ndarray:
        """Occurrences of every type so far."""
        return self.sums("total", "weight").astype(np.int64)

    def table(self) -> pa.Table:
        """One row per token type seen, largest total loss first."""
        seen_T = np.flatnonzero(self.count)
        seen_T = seen_T[np.argsort(-self.sums("total", "value")[seen_T], kind="stable")]
        total = max(self.sums("total", "value").sum(), np.finfo(float).tiny)
        columns = {
            "token_id": seen_T,
            "count": self.count[seen_T],
            "mean": self.mean()[seen_T],
            "variance": self.variance()[seen_T],
            "early_mean": self.mean("early")[seen_T],
            "recent_mean": self.mean("recent")[seen_T],
            "recent_rows": self.effective_rows("recent")[seen_T],
            "loss_share": self.sums("total", "value")[seen_T] / total,
            "grad_norm": self.sums("total", "grad_norm")[seen_T],
        }
        return pa.table(columns)

    def standard_error(self, window: str = "total") -> np.ndarray:
        """Standard error of every type's mean in a window; NaN below two (effective) rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self.variance(window) / self.effective_rows(window))

    def fall(self) -> tuple[np.ndarray, np.ndarray]:
        """Share by which every type's mean loss fell from the early to the late window, and its standard error.

        NaN where a type was not seen in both, or cost nothing at first.
        """
        early_V, late_V = self.mean("early"), self.mean("late")
        with np.errstate(invalid="ignore", divide="ignore"):
            kept_V = np.where(early_V > 0, late_V / early_V, np.nan)
            error_V = np.hypot(self.standard_error("late"), kept_V * self.standard_error("early")) / early_V
        return 1.0 - kept_V, error_V

    def rocks(self, k: int | None = None, *, max_fall: float = 0.25, alpha: float = 0.05) -> list[int]:
        """Types proven to cost more than average of late AND proven not to learn; largest certain excess first.

        Args:
            k: largest number of types to return.
            max_fall: a rock's mean loss has fallen by less than this share from the early to the late window.
            alpha: chance that any type is named wrongly, shared over all types tested (Bonferroni).

        Returns:
            Token ids; empty where nothing can be said, which includes the first two half-lives. A type is tested
            where both windows have at least 20 effective rows. Needs no scoring pass; `detect` is the exact form.
        """
        weight_V = self.sums("late", "weight")
        rows_V = np.minimum(self.effective_rows("early"), self.effective_rows("late"))
        tested_T = np.flatnonzero(rows_V >= LEAST_ROWS)
        if not len(tested_T) or self.num_updates < 2 * self.half_life:
            return []
        early_T, late_T = self.mean("early")[tested_T], self.mean("late")[tested_T]
        early_se_T, late_se_T = self.standard_error("early")[tested_T], self.standard_error("late")[tested_T]
        average = self.sums("late", "value").sum() / weight_V.sum()
        quantile_T = sps.t.isf(alpha / len(tested_T), rows_V[tested_T] - 1)
        kept = 1.0 - max_fall
        excess_T = late_T - average - quantile_T * late_se_T
        stayed_T = late_T - quantile_T * np.hypot(late_se_T, kept * early_se_T) > kept * early_T
        low_T = weight_V[tested_T] * excess_T
        order = np.argsort(-low_T, kind="stable")
        return [int(tested_T[at]) for at in order if excess_T[at] > 0 and stayed_T[at]][:k]

    def state_dict(self) -> Row:
        """Everything needed to continue from here."""
        return {
            "version": VERSION,
            "half_life": self.half_life,
            "num_updates": self.num_updates,
            "sums": self._sums_WSV.clone(),
        }

    def load_state_dict(self, state: Row) -> None:
        """Continue from a saved monitor of the same vocabulary."""
        sums_WSV, half_life = state["sums"], state["half_life"]
        require(
            state["version"] == VERSION and sums_WSV.shape == self._sums_WSV.shape and half_life == self.half_life,
            f"saved monitor (version {state['version']}, vocabulary {sums_WSV.shape[-1]}, half_life {half_life}) does "
            f"not fit this one (version {VERSION}, vocabulary {self.vocabulary}, half_life {self.half_life})",
        )
        self._sums_WSV = sums_WSV.to(torch.float64).clone()
        self.num_updates = int(state["num_updates"])
