"""Count the tokens of text, and convert values to text."""

from __future__ import annotations

import json

import tiktoken

# Characters. If the encoding's regular expression fails on a long run of white space (o200k_base at about a million),
# the text is counted in pieces of this size. Each cut adds a token or two.
PIECE = 200_000


def count(encoding: tiktoken.Encoding, text: str) -> int:
    """Return the tokens of ``text``. Special tokens count as ordinary text. Lone surrogates are allowed."""
    if not text:
        return 0
    try:
        return len(encoding.encode(text, disallowed_special=()))
    except ValueError:
        if len(text) <= PIECE:
            # A text never has more tokens than bytes.
            return len(text.encode("utf-8", "surrogatepass"))
    return sum(count(encoding, text[start : start + PIECE]) for start in range(0, len(text), PIECE))


def dump(value: object) -> str:
    """Return a string unchanged, and other values as JSON, or as their leaves if that fails. Never raises."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        # A type that JSON doesn't have, a cycle, a number of thousands of digits, or too deep.
        return _leaves(value)


def escaped(text: str) -> str:
    """Return ``text`` as the inside of a JSON string in ASCII."""
    return json.dumps(text)[1:-1]


def _leaves(value: object) -> str:
    """Return the strings and keys of nested data, each container once, with a placeholder for other leaves."""
    texts: list[str] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, dict | list | tuple):
            if id(item) in seen:
                continue
            seen.add(id(item))
            waiting.extend(item.keys() if isinstance(item, dict) else ())
            waiting.extend(item.values() if isinstance(item, dict) else item)
        elif isinstance(item, int):
            # Three digits are a token. Nine bits are nearly three digits.
            texts.append("000" * (item.bit_length() // 9 + 1))
        else:
            texts.append("null")
    return " ".join(texts)
