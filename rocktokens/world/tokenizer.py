"""The worlds' tokenizer: one piece, one token; a real Hugging Face fast tokenizer whose decoding gives the text back.

Knows grammars' pieces and nothing of models or problems. There is no start token: `tokenizer(prompt)` gives exactly
the ids the models were trained on.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rocktokens.world.grammar import EOS, PAD, SPECIALS, UNK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PIECE = r" ?[A-Za-z]+|[0-9]| ?\\[()]| ?\$| ?\*\*| ?__|->|\s|[^\sA-Za-z0-9]"
"""How text falls into pieces: words and opening marks take the space before them, digits stand alone."""


def make_vocabulary(pieces: Iterable[str], *, seed: int) -> dict[str, int]:
    """Pieces to ids: special tokens first, the others in a seeded order, so that ids carry no meaning."""
    words = sorted(set(pieces) - set(SPECIALS))
    random.Random(seed).shuffle(words)
    return {piece: number for number, piece in enumerate((*SPECIALS, *words))}


def make_tokenizer(vocabulary: dict[str, int], *, max_length: int) -> PreTrainedTokenizerFast:
    """The fast tokenizer over this vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
