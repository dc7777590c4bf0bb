"""The rules of plain technical English that a machine can check, for documents and recipes."""

from __future__ import annotations

import re

MOST_WORDS = 25
"""Words of a sentence."""

_BANNED = (
    r"as far as",
    r"so (?:many|long|much)\b(?! (?:that|as))",
    r"such as begin",
    r"by (?:itself|themselves)",
    r"at least so much",
    r"ha(?:s|ve) no say",
    r"stands?\b(?!-)",
    r"lets? go\b",
    r"told apart",
    r"besides?\b",
    r"anew\b",
    r"in vain",
    r"be it\b",
    r"of (?:ours|yours|theirs)\b",
    r"who(?:ever|soever)\b",
    r"whatever\b",
    r"where\b",
    r"(?<!there )(?:is|are|was|were) no\b",
    r"(?:takes?|gives?) no\b",
    r"(?:teach(?:es)?|taught|hears?|speaks?)\b",
)
_WORDS = re.compile(r"\b(?:" + "|".join(_BANNED) + ")", re.IGNORECASE)
_NOUN_CLAUSE = re.compile(r"(?:^|[:;,] )(?:what|who)\b.*[^?]$", re.IGNORECASE)
_COMPLETE = re.compile(r"[.:!]$")


def without_code(text: str) -> str:
    """Return a Markdown text without blocks of code and pictures. Code in a line becomes "X", a link its text."""
    fenced = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.sub(r"(?<=\n\n)(?: {4}.*\n)+", "\n", fenced)
    pictures = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", indented)
    named = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", pictures)
    return re.sub(r"`[^`]*`", "X", named)


def sentences(text: str) -> list[str]:
    """Return the sentences of a Markdown text: of paragraphs, items, headings and table cells."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.)\s?)|(?<=\|)\n|(?<!\\)\|| · ", without_code(text))
    found = []
    for block in blocks:
        joined = " ".join(block.replace("**", "").split()).lstrip("-#*> ")
        found += [part for part in re.split(r"(?<=[.!?:])\s+(?=[A-Z`(\"])", joined) if re.search(r"[A-Za-z]", part)]
    return found


def findings(text: str) -> list[str]:
    """Return a line for each sentence of a Markdown text that breaks a rule."""
    found = []
    for sentence in sentences(text):
        if banned := _WORDS.search(sentence):
            found.append(f"'{banned[0]}' in: {sentence}")
        if _COMPLETE.search(sentence) and _NOUN_CLAUSE.search(sentence):
            found.append(f"a clause begins with a question word: {sentence}")
        if len(sentence.split()) > MOST_WORDS:
            found.append(f"over {MOST_WORDS} words: {sentence}")
    return found
