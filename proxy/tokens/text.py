"""Tokens of text, and of JSON as text."""

from __future__ import annotations

import json

import tiktoken

# Where the encoding's expression gives up on a long run of white space (o200k_base at about a million), the text is
# counted in pieces of this many characters; a cut costs a token or two.
PIECE = 200_000


def count(encoding: tiktoken.Encoding, text: str) -> int:
    """Tokens of ``text``. Special tokens spelled out in it are ordinary text; lone surrogates are no error."""
    if not text:
        return 0
    try:
        return len(encoding.encode(text, disallowed_special=()))
    except ValueError:
        if len(text) <= PIECE:
            # Never more tokens than bytes.
            return len(text.encode("utf-8", "surrogatepass"))
    return sum(count(encoding, text[start : start + PIECE]) for start in range(0, len(text), PIECE))


def dump(value: object) -> str:
    """``value`` as JSON, text as it is; what JSON can't hold is taken leaf by leaf, so that this never raises."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        # No JSON type, a circle, a number of thousands of digits, or too deep.
        return _leaves(value)


def escaped(text: str) -> str:
    """``text`` as the inside of a JSON string in ASCII."""
    return json.dumps(text)[1:-1]


def _leaves(value: object) -> str:
    """The strings and keys of nested data, each container once, with a mark for every other leaf."""
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
            # Three digits are a token; nine bits are nearly that many.
            texts.append("000" * (item.bit_length() // 9 + 1))
        else:
            texts.append("null")
    return " ".join(texts)
