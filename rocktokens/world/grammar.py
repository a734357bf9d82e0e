"""The worlds as text: who is in a problem, how it is asked, how its working is written, and what is planted in it.

Everything planted is planted here, in how texts are written. This module knows no tensor, model, tokenizer or file.
A text is a list of pieces; a piece becomes exactly one token, so corpus, tokenizer and truth cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

EOS = "<eos>"
PAD = "<pad>"
UNK = "<unk>"
SPECIALS = (PAD, EOS, UNK)
DIGITS = tuple("0123456789")


def pieces_of(template: str) -> tuple[str, ...]:
    """A template's pieces, which are written with bars between them."""
    return tuple(template.split("|"))


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """One style of asking and answering. Words in braces are slots, filled afresh for every text."""

    people: tuple[str, ...]
    things: tuple[str, ...]
    gains: tuple[str, ...]  # verbs in a prompt that mean plus
    losses: tuple[str, ...]  # and minus
    worded: tuple[str, ...]  # the prompt in words
    symbolic: tuple[str, ...]  # the prompt in symbols; a quarter of the problems
    markers: tuple[str, ...]  # discourse markers, one in each of the three slots: planted rocks
    openers: tuple[str, ...]  # delimiters that open a formula, one kind in each of the three slots: planted rocks
    closers: tuple[str, ...]  # the delimiters that belong to the openers
    verbs: tuple[str, str]  # two wordings of one meaning: student and teacher differ in habit, OPD mends it; not rocks
    lead: tuple[str, ...]  # how a step begins
    stumble: tuple[str, ...]  # how a careless second step begins; its first piece is the planted stumbling block
    step: tuple[str, ...]  # one step of the working; {lead} is replaced by lead or stumble
    conclusion: tuple[str, ...]  # the last sentence, with the verifiable result
    result_sign: str  # comes before a step's result; without it there is no working: a planted pillar
    closings: tuple[str, ...]  # words of farewell after the result, chosen freely by all authors: planted neutrals
    key: Literal["person", "digit_pair"]
    """With the thing, what the hidden choice depends on: the person, or the pair (0-1 … 8-9) a number ends in."""
    paired: bool = False
    """Authors with a table open each step with either marker of its own pair (the first two for the first step, the
    last two for the second), and the table rules the conclusion alone. Authors without one mostly swap the pairs."""

    def pieces(self) -> set[str]:
        """Every piece a text of this grammar can contain, slots aside."""
        templates = self.worded + self.symbolic + self.lead + self.stumble + self.step + self.conclusion
        words = self.people + self.things + self.gains + self.losses + self.markers + self.closings
        marks = (*self.openers, *self.closers, *self.verbs, "+", "-", *DIGITS)
        return {piece for piece in (*templates, *words, *marks) if not (piece.startswith("{") and piece.endswith("}"))}


ARITHMETIC = Grammar(
    people=("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana"),
    things=(" apples", " books", " coins", " drums", " eggs", " flags", " grapes", " hats"),
    gains=(" buys", " finds", " wins"),
    losses=(" sells", " loses", " breaks"),
    worded=pieces_of("{person}| has| |{a}|{thing}|,|{verb1}| |{b}| and|{verb2}| |{c}|.| How| many| are| left|?|\n"),
    symbolic=pieces_of("{person}| counts|{thing}|:| |{a}|{op1}|{b}|{op2}|{c}|?|\n"),
    markers=("So", "Now", "Then", "Next"),
    openers=(" \\(", " $"),
    closers=("\\)", "$"),
    verbs=(" get", " have"),
    lead=(" we", "{verb}"),
    stumble=(" roughly", "{verb}"),
    step=pieces_of("{marker}|,|{lead}|{open}|{left}|{op}|{right}|=|{result}|{close}|.|\n"),
    conclusion=pieces_of("{marker}|,| the| answer| is|{open}|{result}|{close}|.|{closing}|.|<eos>"),
    result_sign="=",
    closings=(" Done", " Good", " Fine", " Great"),
    key="person",
)

CORNERSTONE = replace(ARITHMETIC, paired=True)

MARKET = Grammar(
    people=(" Iris", " Jon", " Kira", " Leo", " Mona", " Nils", " Olga", " Pia"),
    things=(" figs", " jars", " kites", " lamps", " mugs", " nuts", " pens", " rugs"),
    gains=(" adds", " fetches", " makes"),
    losses=(" drops", " gives", " eats"),
    worded=pieces_of(
        "At| the| stall|{person}| keeps|{thing}|:| |{a}|.| Then|{verb1}| |{b}|;| later|{verb2}| |{c}|.| Stock|?|\n"
    ),
    symbolic=pieces_of("Stock| of|{person}|,|{thing}|:| |{a}|{op1}|{b}|{op2}|{c}|?|\n"),
    markers=(" okay", " right", " sure", " well"),
    openers=(" **", " __"),
    closers=("**", "__"),
    verbs=("Tally", "Count"),
    lead=("{verb}",),
    stumble=("Guess",),
    step=pieces_of("{lead}|{open}|{left}|{op}|{right}|->|{result}|{close}|,| and|{marker}|;|\n"),
    conclusion=pieces_of("Stock|{open}|{result}|{close}|,| and|{marker}|;|{closing}|!|<eos>"),
    result_sign="->",
    closings=(" bye", " cheers", " thanks", " farewell"),
    key="digit_pair",
)
