"""Which token types are banned, and together with which others: named or top candidates, windows, families, controls.

Knows token ids, texts and tables of token types; it asks nothing of a model. A set that equals another (a token without
other surface forms, a control that is a candidate anyway) is there once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from rocktokens.causal.census import BannedSet
from rocktokens.causal.settings import KnockoutConfig
from rocktokens.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def texts_of(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Text of every token id."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    texts = tokenizer.batch_decode([[token_id] for token_id in ids], skip_special_tokens=False)
    return dict(zip(ids, texts))


def named_tokens(
    names: Iterable[str], texts: Mapping[int, str], tokenizer: PreTrainedTokenizerBase | None = None
) -> list[int]:
    """Token ids of what a user named: `#17` is an id, anything else a token's text, or its raw name."""
    by_text: dict[str, list[int]] = {}
    for token_id, text in texts.items():
        by_text.setdefault(text, []).append(token_id)
    raw = {} if tokenizer is None else tokenizer.get_vocab()
    found = []
    for name in names:
        if name.startswith("#") and name[1:].isdigit():
            if int(name[1:]) not in texts:
                raise ConfigError(f"there is no token {name}; ids go from #{min(texts)} to #{max(texts)}")
            found.append(int(name[1:]))
        elif len(by_text.get(name, [])) == 1:
            found += by_text[name]
        elif name in raw:
            found.append(int(raw[name]))
        elif name in by_text:
            several = ", ".join(f"#{token_id}" for token_id in by_text[name])
            raise ConfigError(f"{name!r} is the text of several tokens: {several}; name one by its id")
        else:
            spaced = [text for text in by_text if text.strip() == name]
            near = spaced or difflib.get_close_matches(name, by_text, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"no token has the text {name!r}{hint} (a leading space is part of a token)")
    return list(dict.fromkeys(found))


def families(texts: Mapping[int, str]) -> dict[int, tuple[int, ...]]:
    """Every type with its other surface forms: leading space and case."""
    forms: dict[str, list[int]] = {}
    for token_id, text in texts.items():
        forms.setdefault(text.lstrip(" ").casefold() or f"\0{token_id}", []).append(token_id)
    return {token_id: tuple(sorted(own)) for own in forms.values() for token_id in own}


def window_sets(
    tokens: Iterable[int],
    candidates: Sequence[int],
    pieces: Iterable[Mapping[str, np.ndarray]],
    *,
    tau: float,
    width: int,
    share: float = 0.1,
) -> dict[int, tuple[int, ...]]:
    """Types with the candidates inside the high-divergence windows of their occurrences (docs/method.md §5).

    A candidate belongs if it stands inside so often that its number is at least `share` of the type's own.

    Args:
        tokens: the types.
        candidates: what may belong to them.
        pieces: rollout, token and loss of positions, in order; every rollout whole in one of them.
        tau: a position is high if the moving mean of three losses is at least this.
        width: positions on either side that a window has at most.
        share: see above.
    """
    tokens = list(tokens)
    ids_C = np.unique(np.array([*tokens, *candidates], np.int64))
    own_C, may_belong_C = np.isin(ids_C, tokens), np.isin(ids_C, candidates)
    hits_C, inside_CC = np.zeros(len(ids_C), np.int64), csr_array((len(ids_C), len(ids_C)), dtype=np.int64)
    for piece in pieces:
        place_N = np.searchsorted(ids_C, piece["token"]).clip(max=len(ids_C) - 1)
        place_N[ids_C[place_N] != piece["token"]] = -1
        hits_C += np.bincount(place_N[place_N >= 0], minlength=len(ids_C))
        high_N, follows_N = _high_losses(piece, tau)
        inside_CC = inside_CC + _inside_windows(place_N, own_C, high_N, follows_N, width)
    found = {}
    for place, token in enumerate(ids_C.tolist()):
        if own_C[place]:
            row = inside_CC[[place]].tocoo()
            often = row.coords[1][(row.data > 0) & (row.data >= share * hits_C[place])]
            found[token] = tuple(sorted({token, *ids_C[often[may_belong_C[often]]].tolist()}))
    return found


def _high_losses(piece: Mapping[str, np.ndarray], tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Whether the mean of a position's loss and its neighbours' is high; whether it follows the one before (N + 1)."""
    loss_N, rollout_N = np.nan_to_num(np.asarray(piece["loss"], float)), piece["rollout"]
    follows_N = np.zeros(len(loss_N) + 1, bool)
    follows_N[1:-1] = rollout_N[1:] == rollout_N[:-1]
    joined_N = follows_N[1:-1]
    total_N, count_N = loss_N.copy(), np.ones(len(loss_N))
    total_N[1:] += loss_N[:-1] * joined_N
    total_N[:-1] += loss_N[1:] * joined_N
    count_N[1:] += joined_N
    count_N[:-1] += joined_N
    return total_N / count_N >= tau, follows_N


def _inside_windows(
    place_N: np.ndarray, own_C: np.ndarray, high_N: np.ndarray, follows_N: np.ndarray, width: int
) -> csr_array:
    """How many positions of each candidate lie inside a type's windows; none counts twice for one type."""
    number, kinds = len(place_N), len(own_C)
    start_H = np.flatnonzero((place_N >= 0) & high_N)
    start_H = start_H[own_C[place_N[start_H]]]
    found = [np.empty(0, np.int64)]
    for way in (1, -1):
        here_H, owner_H = start_H, place_N[start_H]
        for _ in range(width):
            # The window extends while the neighbour is of the same rollout and high itself.
            on_H = follows_N[here_H + (way > 0)]
            here_H, owner_H = here_H[on_H] + way, owner_H[on_H]
            here_H, owner_H = here_H[high_N[here_H]], owner_H[high_N[here_H]]
            other_H = (place_N[here_H] >= 0) & (place_N[here_H] != owner_H)
            found.append(owner_H[other_H] * number + here_H[other_H])
    owner_W, row_W = np.divmod(np.unique(np.concatenate(found)), max(number, 1))
    return csr_array((np.ones(len(row_W), np.int64), (owner_W, place_N[row_W])), shape=(kinds, kinds))


def matched_controls(
    rocks: Sequence[int], others: Iterable[int], count: Mapping[int, float], exclude: Iterable[int] = ()
) -> dict[int, int]:
    """For every rock a non-rock of its own that is as frequent: the matching of least distance on a log scale."""
    excluded = set(rocks) | set(exclude)
    pool = [token for token in others if token not in excluded and count.get(token, 0) > 0]
    wanted = [token for token in rocks if count.get(token, 0) > 0]
    if not pool or not wanted:
        return {}
    distance = np.abs(np.log([count[token] for token in wanted])[:, None] - np.log([count[token] for token in pool]))
    return {wanted[i]: pool[j] for i, j in zip(*linear_sum_assignment(distance))}


def make_sets(
    candidates: Sequence[int],
    config: KnockoutConfig,
    texts: Mapping[int, str],
    *,
    eos_ids: Sequence[int],
    rocks: Sequence[int] = (),
    count: Mapping[int, float] | None = None,
    occurrences: Iterable[Mapping[str, np.ndarray]] | None = None,
    tau: float | None = None,
    width: int = 4,
) -> list[BannedSet]:
    """All sets that the configuration asks for, each once, candidates before controls.

    `occurrences` are read once, piece by piece (see `window_sets`), and only where windows are asked for.
    """
    sets: dict[tuple[int, ...], BannedSet] = {}
    forms = families(texts) if "family" in config.kinds else {}
    wider = [token for token in candidates if config.wider_sets_of != "rocks" or token in rocks]
    windows: dict[int, tuple[int, ...]] = {}
    if "window" in config.kinds and wider:
        if occurrences is None or tau is None:
            raise ConfigError("window knock-outs need scored occurrences and a detection; run those first")
        windows = window_sets(wider, candidates, occurrences, tau=tau, width=width)
    for kind in config.kinds:
        for token_id in candidates if kind == "token" else wider:
            members: tuple[int, ...] = (token_id,)
            if kind == "family":
                members = tuple(m for m in forms.get(token_id, (token_id,)) if m == token_id or m not in eos_ids)
            elif kind == "window":
                members = windows[token_id]
            text = texts.get(token_id, f"#{token_id}")
            sets.setdefault(members, BannedSet(f"{kind}:{token_id}", kind, token_id, text, members))
    if config.controls and "token" in config.kinds and count:
        tested = [rock for rock in rocks if rock in set(candidates)]
        for rock, control in matched_controls(tested, count, count, exclude=eos_ids).items():
            text = texts.get(control, f"#{control}")
            own = BannedSet(f"token:{control}", "token", control, text, (control,), "control", f"token:{rock}")
            sets.setdefault((control,), own)
    return list(sets.values())
