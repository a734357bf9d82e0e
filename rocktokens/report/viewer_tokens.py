"""How the viewer names tokens and prompts: a list of token types that the page shares, and prompts as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rocktokens.causal.figures import verdicts_by_token
from rocktokens.facts import Facts
from rocktokens.show import estimate, interval, points, visible
from rocktokens.values import Row

Decode = Callable[[Sequence[int]], str]
PROMPT_LENGTH = 4_000
"""Characters of a prompt that are shown; of a longer one the middle is left out."""


class Types:
    """Token types in the order in which the page first needs them."""

    def __init__(self, facts: Facts, decode: Decode | None) -> None:
        self.facts, self.decode = facts, decode
        self._place: dict[int, int] = {}
        self._rows = {row["token_id"]: row for row in facts.types}

    @property
    def ids(self) -> list[int]:
        """Token ids by place."""
        return list(self._place)

    def place(self, token_id: int) -> int:
        """Where a token type stands in the page's list."""
        return self._place.setdefault(token_id, len(self._place))

    def text(self, token_id: int) -> str:
        """A token's text: as detection named it, else by the tokenizer, else its id."""
        if token_id in self.facts.texts or self.decode is None:
            return self.facts.token(token_id)
        return self.decode([token_id])

    def rows(self) -> list[Row]:
        """What the page knows about each."""
        verdicts = verdicts_by_token(self.facts)
        return [self._row(token_id, verdicts.get(token_id)) for token_id in self._place]

    def _row(self, token_id: int, census: Row | None) -> Row:
        row, text = self._rows.get(token_id, {}), self.text(token_id)
        shown: dict[str, object] = {"id": token_id, "text": visible(text), "flow": visible(text, flow=True)}
        shown["cluster"] = row.get("cluster") or "unknown"
        shown["rock"] = token_id in self.facts.rock_ids
        if row.get("class"):
            shown["class"] = str(row["class"])
        if census is not None:
            effect = estimate(census, "delta")
            shown["verdict"] = census["verdict"] + (f", Δ {interval(effect, points)} points" if effect else "")
        return shown


def quoted(names: Iterable[str]) -> str:
    """Names as a list of SQL strings."""
    return ", ".join("'" + name.replace("'", "''") + "'" for name in names)


def prompt_text(facts: Facts, row: Row, decode: Decode | None) -> str | None:
    """The prompt as text, its middle left out where it is long; None where nothing can spell it."""
    ids = row.get("prompt_ids") or []
    if decode is not None:
        text = visible(decode(ids), flow=True)
    elif ids and all(token_id in facts.texts for token_id in ids):
        text = visible("".join(facts.texts[token_id] for token_id in ids), flow=True)
    else:
        return None
    if len(text) <= PROMPT_LENGTH:
        return text
    half = PROMPT_LENGTH // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
