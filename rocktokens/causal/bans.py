"""Which token types are banned, and together with which others: named or top candidates, windows, families, controls.

Knows token ids, texts and tables of token types; it asks nothing of a model. A set that equals another (a token without
other surface forms, a control that is a candidate anyway) is there once.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linear_sum_assignment

from rocktokens.causal.census import BannedSet
from rocktokens.causal.settings import KnockoutConfig
from rocktokens.errors import ConfigError
from rocktokens.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW_SHARE = 0.1  # of a type's occurrences that must have a candidate in their windows


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
        # What is nothing but spaces has no other form.
        forms.setdefault(text.lstrip(" ").casefold() or f"\0{token_id}", []).append(token_id)
    return {token_id: tuple(sorted(own)) for own in forms.values() for token_id in own}


def window_sets(
    run: Run, tokens: Sequence[int], candidates: Sequence[int], *, tau: float, width: int
) -> dict[int, tuple[int, ...]]:
    """Types with the candidates inside the high-divergence windows of their occurrences (docs/method.md §5).

    A window is the run of high positions around an occurrence, at most `width` to either side; a position is high if
    the mean loss of it and its two neighbours is at least `tau`. A candidate belongs if its positions inside number at
    least WINDOW_SHARE of the type's occurrences.
    """
    step = run.steps()[-1]
    inside = run.query(
        f"""
        with measured as (
            select rollout_id, position, token_id, avg(if(isnan(kl), 0, coalesce(kl, 0)))
                over (partition by rollout_id order by position rows between 1 preceding and 1 following) >= ? as high
            from occurrences where step = {step}
        ), runs as (  -- high positions of one run differ by as much as their row numbers
            select *, position - row_number() over (partition by rollout_id order by position) as run
            from measured where high
        ), pairs as (
            select distinct own.token_id as owner, other.token_id as member, other.rollout_id, other.position
            from runs own cross join range(-{width}, {width} + 1) as near(away)
            join runs other on other.rollout_id = own.rollout_id and other.position = own.position + near.away
            where other.run = own.run and other.token_id <> own.token_id
                and list_contains(?, own.token_id) and list_contains(?, other.token_id)
        ), often as (
            select token_id, count(*) as number from occurrences where step = {step} group by token_id
        )
        select owner, member from pairs join often on often.token_id = owner
        group by owner, member, number having count(*) >= {WINDOW_SHARE} * number
        """,
        (tau, list(tokens), list(candidates)),
    )
    found = {token: {token} for token in tokens}
    for owner, member in zip(inside["owner"].to_pylist(), inside["member"].to_pylist()):
        found[owner].add(member)
    return {token: tuple(sorted(own)) for token, own in found.items()}


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
    windows: Callable[[Sequence[int]], Mapping[int, tuple[int, ...]]] | None = None,
) -> list[BannedSet]:
    """All sets that the configuration asks for, each once, candidates before controls.

    `windows`: window sets of these types, where occurrences were scored and a detection has set the threshold.
    """
    sets: dict[tuple[int, ...], BannedSet] = {}
    wider = [token for token in candidates if config.wider_sets_of != "rocks" or token in rocks]
    forms = families(texts) if "family" in config.kinds else {}
    inside: Mapping[int, tuple[int, ...]] = {}
    if "window" in config.kinds and wider:
        if windows is None:
            raise ConfigError("window knock-outs need scored occurrences and a detection; run those first")
        inside = windows(wider)
    for kind in config.kinds:
        for token_id in candidates if kind == "token" else wider:
            members: tuple[int, ...] = (token_id,)
            if kind == "family":
                members = tuple(m for m in forms.get(token_id, (token_id,)) if m == token_id or m not in eos_ids)
            elif kind == "window":
                members = inside[token_id]
            text = texts.get(token_id, f"#{token_id}")
            sets.setdefault(members, BannedSet(f"{kind}:{token_id}", kind, token_id, text, members))
    if config.controls and "token" in config.kinds and count:
        tested = [rock for rock in rocks if rock in set(candidates)]
        for rock, control in matched_controls(tested, count, count, exclude=eos_ids).items():
            text = texts.get(control, f"#{control}")
            own = BannedSet(f"token:{control}", "token", control, text, (control,), "control", f"token:{rock}")
            sets.setdefault((control,), own)
    return list(sets.values())
