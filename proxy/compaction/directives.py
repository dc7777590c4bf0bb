"""Find the sentences in a text that state a rule, a limit, a preference, or a correction.

A summary tends to lose them, although they hold for the rest of a conversation. Words that make demands have weights,
so the search also finds rules about unknown subjects. It knows English wordings, and a few words of other languages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

Rule = TypeVar("Rule", bound=Hashable)

LONGEST = 500
"""Characters. A longer sentence isn't a rule but a paste."""

SHORTEST = 8
"""Characters of the shortest rule."""

MOST = 262_144
"""Characters of a text that are searched: half of them from its beginning, half from its end."""

WRAPPED = 50
"""Characters of a line that may continue in the next one."""

_END = re.compile(r"[.!?][\"')\]*_`”]{0,3}\s+")
# Bullets, numbers, quotation marks, and the line numbers that tools add.
_BULLET = re.compile(r"(?:\s{0,12}\d{1,6}(?:→|\t|[:|] ?))?\s{0,40}(?:(?:[-*+•>#]{1,4}|\d{1,3}[.)])\s{1,8}|[*_]{2})?")
_AROUND = ".,;:!?\"'()[]*_`“”"
_SYMBOL = re.compile(r"[^\w\s]")
_CODE = re.compile(r"[{};=<>\\]|\)\s{0,4}:|\w\(")

ENOUGH = 9
"""The weight from which a sentence counts as a rule."""

SAID = 4
"""The weight from which a sentence of the user may be one. If there's too little room, heavier ones come first."""

# The weights of words, by meaning. A meaning counts once for each sentence.
_ANYWHERE = (
    (6, "never always must mustn't shall don't forbidden prohibited mandatory required forbid refrain essential"),
    (6, "niemals immer jamais toujours nunca siempre sempre nigdy zawsze никогда всегда"),
    (4, "should shouldn't cannot can't won't avoid prefer preferably rather instead except without unless allowed"),
    (4, "only most least maximum minimum limit limits limited budget deadline exactly until longer further onwards"),
    (4, "important constraint constraints rule rules requirement requirements policy convention conventions guideline"),
    (5, "want need needs hate love dislike allergic expect insist behalf permission approval"),
    (4, "now forward rest circumstances times"),
    (3, "no not nor nothing nobody none over"),
    (2, "every each all any everything anything whatever both"),
    (3, "you your yours i me my mine we us our ours i'm i'd i'll let's you're we're"),
    (3, "reply replies answer answers respond response responses message messages sentence word words paragraph"),
    (3, "language tone format style name names called paragraphs"),
)  # fmt: skip
# Those of the first word of a sentence.
_FIRST = (
    (12, "don't never always only avoid stop no refrain remember ensure nobody nothing"),
    (5, "when whenever before after if unless until while once each every for from at under as"),
    (6, "actually correction instead sorry wait"),
)
_VERB = 6
_VERBS = (
    "add address adopt aim answer apply ask assume attach base begin build call cap check choose cite close "
    "commit compare confirm consider convert copy count cover create default define delete deliver document "
    "double draft drop end escape exclude expect explain export favor favour fetch finish fix focus follow format "
    "generate get give go group handle highlight hold ignore include indent insert install keep label lead leave "
    "let limit link list log look maintain make mark match mention merge move name note offer omit open order "
    "organize output pass pick place preface prefer prefix preserve print produce propose prove provide put quote "
    "read refer reference remove rename repeat replace reply report request resolve respect respond restate "
    "review round run save say select send separate set show sign skip solve sort speak specify spell "
    "split start state stay stick structure suggest summarize switch take talk target tell test translate treat "
    "try turn update use validate verify wait watch work wrap write"
)
_POLITE = ("please", "also", "and", "but", "so", "then", "just", "ok", "okay", "kindly", "again")
_PLEASE = 4
_CLAUSE = 4
"""The weight of a demand after a comma, as in "when you are done, tell me"."""
_HAVE_TO = 5
_QUESTION = 6
_LOOKS_LIKE_CODE = 5
_CHARACTERS_PER_POINT = 100
"""A sentence loses a point for each hundred characters, because long ones have more words of any kind."""

_AFTER_COMMA = {*_VERBS.split(), "not", "never"}
_WEIGHTS = [weight for weight, _ in _ANYWHERE]
# Words with the usual characters around them are entries of their own, because that's faster than removing them.
_MEANINGS = {
    f"{before}{form}{after}": number
    for number, (_, words) in enumerate(_ANYWHERE)
    for word in words.split()
    for form in {word, word.replace("'", "’")}
    for before in ("", "**", "*", "_", '"', "(")
    for after in ("", ".", ",", ":", ";", "!", "?", "**", "*", "_", '"', ")")
}
_AT_START = {word: weight for weight, words in _FIRST for word in words.split()} | dict.fromkeys(_VERBS.split(), _VERB)

_INSTRUCTIONS = re.compile(
    r"(?<![\w.-])(?:(?:AGENTS|CLAUDE|GEMINI|CONTRIBUTING|CONVENTIONS|COPILOT|RULES)(?:\.local)?\.md|"
    r"copilot-instructions\.md|\.cursorrules|\.windsurfrules|\.clinerules|[\w.-]{1,60}\.mdc)\b",
    re.IGNORECASE,
)
INSTRUCTION_MARKS = (b".md", b".MD", b"rules")
"""Bytes of which every call that names such a file has some."""

_FOLDER = re.compile(r"[\w./~@-]*\Z")
_LONGEST_FOLDER = 100
_ARGUMENTS = 2_000
"""Characters of a call's arguments that are searched for a file. Those of calls that read files are shorter."""


def instruction_file(arguments: str) -> str | None:
    """Return the path of the file with instructions that a call's arguments name; ``None`` if they name none."""
    match = _INSTRUCTIONS.search(arguments, 0, _ARGUMENTS)
    if match is None:
        return None
    folder = _FOLDER.search(arguments, max(0, match.start() - _LONGEST_FOLDER), match.start())
    return f"{folder.group() if folder else ''}{match.group()}"


def directives(text: str, least: int = SAID) -> dict[str, int]:
    """Return the sentences of a text that may state a rule, in order, with their weights of at least ``least``."""
    if len(text) > MOST:
        text = f"{text[: MOST // 2]}\n{text[-MOST // 2 :]}"
    found: dict[str, int] = {}
    for sentence in _sentences(text):
        weight = _weight(sentence)
        # Logs and data have the same words, but more other characters.
        if weight >= least and len(_SYMBOL.findall(sentence)) <= 0.2 * len(sentence):
            found.setdefault(sentence, weight)
    return found


def _sentences(text: str) -> Iterator[str]:
    for part in _parts(text):
        start = 0
        for end in [*(match.end() for match in _END.finditer(part)), len(part)]:
            sentence = part[start:end]
            start = end
            for piece in sentence.split("\n") if len(sentence) > LONGEST else (sentence,):
                if len(piece) >= SHORTEST and (bullet := _BULLET.match(piece)) is not None:
                    rule = piece[bullet.end() :].strip()
                    if SHORTEST <= len(rule) <= LONGEST:
                        yield rule


def _parts(text: str) -> list[str]:
    """Return the lines of a text. A long line and those that continue it in lower case are one."""
    parts: list[str] = []
    before = ""
    for line in text.split("\n"):
        if len(before) >= WRAPPED and len(parts[-1]) <= LONGEST and line[:12].lstrip()[:1].islower():
            parts[-1] = f"{parts[-1]}\n{line}"
        elif len(line) >= SHORTEST:
            parts.append(line)
        before = line
    return parts


def _weight(sentence: str) -> int:
    """Return how much a sentence sounds like a demand."""
    lower = sentence.lower()
    words = lower.split()
    weight = _start(words)
    if found := _MEANINGS.keys() & words:
        weight += sum(_WEIGHTS[number] for number in {_MEANINGS[word] for word in found})
    if ", " in sentence:
        clauses = [clause.partition(" ")[0] for clause in sentence.split(", ")[1:]]
        weight += 0 if _AFTER_COMMA.isdisjoint(clauses) else _CLAUSE
    weight += _HAVE_TO if "has to " in lower or "have to " in lower else 0
    if weight < SAID:
        return weight
    weight -= len(sentence) // _CHARACTERS_PER_POINT
    weight -= _QUESTION if sentence.endswith("?") else 0
    return weight - (_LOOKS_LIKE_CODE if _CODE.search(sentence) else 0)


def _start(words: list[str]) -> int:
    """Return the weight of a sentence's first words."""
    weight = 0
    for place, word in enumerate(words[:4]):
        word = word.strip(_AROUND).replace("’", "'")
        if word in _POLITE:
            weight = max(weight, _PLEASE if word in ("please", "kindly") else 0)
            continue
        if word == "do" and words[place + 1 : place + 2] == ["not"]:
            word = "don't"
        return weight + _AT_START.get(word, 0)
    return weight


_MISSES = 16
"""Rules that may be too long before the search for one that fits ends."""


def heaviest(found: Mapping[Rule, int], most: int, size: Callable[[Rule], int]) -> list[Rule]:
    """Return the rules with the largest weights that fit, in order. ``size`` returns a rule's part of ``most``."""
    chosen = set()
    missed = 0
    for rule in sorted(found, key=lambda rule: -found[rule]):
        taken = size(rule)
        if taken <= most:
            chosen.add(rule)
            most -= taken
        elif (missed := missed + 1) == _MISSES:
            break
    return [rule for rule in found if rule in chosen]


def rule_lines(text: str, characters: int) -> list[str]:
    """Return the rules in a text with the largest weights, at most ``characters`` characters, in order."""
    return heaviest(directives(text), characters, lambda rule: len(rule) + 1) if characters >= SHORTEST else []
