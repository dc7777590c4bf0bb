"""The rules of plain technical English that a machine can check, for documents, docstrings, and comments."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

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


def code_findings(source: str) -> list[str]:
    """Return a line for each sentence of a Python module's docstrings and comments that breaks a rule."""
    return [found for text in (*_docstrings(source), *_comments(source)) for found in findings(text.replace("``", "`"))]


def script_findings(source: str) -> list[str]:
    """Return a line for each sentence of a shell script's or Dockerfile's comments that breaks a rule."""
    blocks = re.findall(r"(?:^ *#(?!!).*\n)+", source, flags=re.MULTILINE)
    return [found for block in blocks for found in findings(re.sub(r"^ *# ?", "", block, flags=re.MULTILINE))]


def _docstrings(source: str) -> Iterator[str]:
    """Yield all string statements: docstrings, and the descriptions below constants and fields."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def _comments(source: str) -> Iterator[str]:
    """Yield comments, with consecutive lines joined, and without directives for tools."""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"# ?(?:noqa|type:|fmt:|pragma)", token.string):
            continue
        if token.start[0] != last + 1:
            yield "\n".join(block)
            block = []
        block.append(token.string.lstrip("# "))
        last = token.start[0]
    yield "\n".join(block)
