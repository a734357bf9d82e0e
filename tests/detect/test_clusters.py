"""Clusters by a token's text."""

import pytest

from rocktokens.detect.clusters import cluster_of


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("$", "math"), (" $", "math"), ("$$", "math"), ("\\(", "math"), (" \\[", "math"), ("\\frac", "math"),
        ("\\boxed{", "math"), ("}", "math"), ("^{", "math"), (" =", "math"), ("+", "punctuation_or_math"),
        ("\n\n", "markdown"), (" ", "markdown"), ("###", "markdown"), (" **", "markdown"), ("```", "markdown"),
        ("<|im_end|>", "markdown"), ("</s>", "markdown"), (".\n\n", "markdown"), ("-", "markdown"),
        ("Wait", "discourse"), (" therefore", "discourse"), ("Let", "discourse"), (" So", "discourse"),
        ("7", "digits"), (" 42", "digits"), ("3.14", "digits"),
        (",", "punctuation"), (".", "punctuation"), (" (", "punctuation"), ("?", "punctuation"),
        ("\ufffd", "punctuation"),
        ("triangle", "content"), (" the", "content"), ("é", "content"), ("数", "content"),
    ],
)  # fmt: skip
def test_cluster(text, cluster):
    found = cluster_of(text)
    assert found == cluster or (cluster == "punctuation_or_math" and found in ("math", "markdown"))
