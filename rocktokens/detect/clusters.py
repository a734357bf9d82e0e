"""What kind of token is it? Six clusters by the token's text alone; no model, no language beyond English markers."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import numpy as np

from rocktokens.detect.occurrences import Array
from rocktokens.errors import DataError

Cluster = Literal["math", "markdown", "discourse", "digits", "punctuation", "content", "unknown"]
CLUSTERS: tuple[Cluster, ...] = get_args(Cluster)
TITLES = {
    "math": "math and LaTeX delimiters",
    "markdown": "markdown and whitespace",
    "discourse": "discourse markers",
    "digits": "digits",
    "punctuation": "other punctuation",
    "content": "content words",
    "unknown": "no tokenizer at hand",
}
_MARKERS = """so then thus therefore hence now next first second third finally lastly wait but however let lets okay ok
well also because since maybe perhaps alternatively actually hmm note recall suppose assume given if when where overall
indeed meanwhile instead although though while again similarly specifically step steps check verify conclusion final"""
DISCOURSE = frozenset(_MARKERS.split())
SPECIAL = re.compile(r"^<[|/]?[A-Za-z_｜|][^<>]*>$|^\[(PAD|EOS|BOS|UNK|SEP|CLS)\]$")
MARKDOWN = re.compile(r"^(#{1,6}|\*{1,3}|_{2,}|-{2,}|`{1,3}|~{2,}|>|\|+[-:|\s]*|[-*+•]|---+|===+)[:.]*$")
MATH = re.compile(
    r"^(\\[A-Za-z]*[{(\[]?|\\[^\w\s].*|\$+.*|.*\$+|[{}^_=+<>×÷±∓≤≥≠≈∑∏√∫∞·/&]+|\\+|[(){}\[\]]*[\^_=$\\{}]+.*)$"
)
DIGITS = re.compile(r"^[\d.,]*\d[\d.,]*%?$")


def cluster_of(text: str) -> Cluster:
    """The cluster of a token by its text; whitespace before it does not matter."""
    bare = text.strip()
    if not bare or SPECIAL.match(bare):
        return "markdown"
    if DIGITS.match(bare):
        return "digits"
    if "\n" in text and not any(c.isalnum() for c in bare):
        return "markdown"
    if bare.lower().replace("'", "").replace("’", "") in DISCOURSE:
        return "discourse"
    if any(c.isalpha() for c in bare) and not bare.startswith("\\") and "$" not in bare:
        return "content"
    if MARKDOWN.match(bare):
        return "markdown"
    if MATH.match(bare):
        return "math"
    return "content" if any(c.isalnum() for c in bare) else "punctuation"


def token_texts(token_ids_V: Array, tokenizer: Any | None) -> list[str]:
    """Text of every token id by a Hugging Face tokenizer; `#id` where there is none."""
    if tokenizer is None:
        return [f"#{token_id}" for token_id in token_ids_V]
    size = len(tokenizer)
    if int(np.max(token_ids_V)) >= size:
        raise DataError(
            f"token id {np.max(token_ids_V)} is not in the tokenizer, which has {size}: "
            "were these occurrences made with another tokenizer?"
        )
    return [tokenizer.decode([int(token_id)], skip_special_tokens=False) for token_id in token_ids_V]


def clusters_of(texts: list[str], tokenizer: object | None) -> list[Cluster]:
    """Clusters of all types; unknown without a tokenizer."""
    return ["unknown"] * len(texts) if tokenizer is None else [cluster_of(text) for text in texts]
