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

from rocktokens.config import KnockoutConfig
from rocktokens.core.census.census import BannedSet
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
            near = (
                spaced
                or difflib.get_close_matches(name, by_text, n=1, cutoff=0.5)
                or [t for t in by_text if t.strip() == name]
            )
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"no token has the text {name!r}{hint} (a leading space is part of a token)")
    return list(dict.fromkeys(found))


def family(token_id: int, texts: Mapping[int, str], forms: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """A type with its other surface forms: leading space and case. `forms` is `surface_forms(texts)`."""
    return tuple(sorted({token_id, *forms.get(_form(texts.get(token_id, "")), ())}))


def surface_forms(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Token ids by their text without leading space and case."""
    forms: dict[str, list[int]] = {}
    for token_id, text in texts.items():
        if _form(text):
            forms.setdefault(_form(text), []).append(token_id)
    return forms


def _form(text: str) -> str:
    return text.lstrip(" ").casefold()


def window_members(
    token_id: int,
    candidates: Sequence[int],
    occurrences: Mapping[str, np.ndarray],
    *,
    tau: float,
    width: int,
    share: float,
) -> tuple[int, ...]:
    """A type with the candidates inside the high-divergence windows of its occurrences (docs/method.md §5).

    `occurrences`: rollout, token and loss of every position, in order. A candidate belongs if it stands inside so often
    that its number is at least `share` of the type's own.
    """
    import torch

    from rocktokens.core.selection.selectors import high_divergence_window

    token_N = torch.from_numpy(np.asarray(occurrences["token"], np.int64))
    hit_N = token_N == token_id
    if not bool(hit_N.any()):
        return (token_id,)
    inside_N = high_divergence_window(
        hit_N,
        torch.from_numpy(np.asarray(occurrences["loss"], float)),
        torch.from_numpy(np.asarray(occurrences["rollout"], np.int64)),
        width=width,
        tau=tau,
    )
    ids, counts = np.unique(token_N[inside_N & ~hit_N].numpy(), return_counts=True)
    often = set(ids[counts >= share * int(hit_N.sum())].tolist())
    return tuple(sorted({token_id, *(often & set(candidates))}))


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
    occurrences: Mapping[str, np.ndarray] | None = None,
    tau: float | None = None,
    width: int = 4,
) -> list[BannedSet]:
    """All sets that the configuration asks for, each once, candidates before controls."""
    sets: dict[tuple[int, ...], BannedSet] = {}
    forms = surface_forms(texts) if "family" in config.kinds else {}
    for kind in config.kinds:
        only_rocks = kind != "token" and config.wider_sets_of == "rocks"
        for token_id in (token for token in candidates if not only_rocks or token in rocks):
            members: tuple[int, ...] = (token_id,)
            if kind == "family":
                members = tuple(m for m in family(token_id, texts, forms) if m == token_id or m not in eos_ids)
            elif kind == "window":
                if occurrences is None or tau is None:
                    raise ConfigError("window knock-outs need scored occurrences and a detection; run those first")
                members = window_members(
                    token_id, candidates, occurrences, tau=tau, width=width, share=config.window_share
                )
            text = texts.get(token_id, f"#{token_id}")
            sets.setdefault(members, BannedSet(f"{kind}:{token_id}", kind, token_id, text, members))
    if config.controls and "token" in config.kinds and count:
        tested = [rock for rock in rocks if rock in set(candidates)]
        for rock, control in matched_controls(tested, count, count, exclude=eos_ids).items():
            text = texts.get(control, f"#{control}")
            own = BannedSet(f"token:{control}", "token", control, text, (control,), "control", f"token:{rock}")
            sets.setdefault((control,), own)
    return list(sets.values())
