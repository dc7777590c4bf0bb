"""Count the tokens of text with tiktoken's encodings, without a network, and convert values to text.

LiteLLM's package contains some of tiktoken's files under their names in tiktoken's cache (the SHA-1 of their URL). The
proxy reads them from there. A missing encoding is a configuration error, never a download.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import tiktoken

from proxy.compaction.pieces import pause
from proxy.errors import ConfigurationError
from proxy.litellm_package import tokenizers

PIECE = 65_536
"""Characters. Longer texts are counted in pieces, so that a thread can pause between them. A cut between words doesn't
change the count. If a piece ends with a long run of other characters, its cut adds a token or two."""

# Between such characters, every encoding begins a new token. The second one begins a word.
_CUT = re.compile(r"[a-z](?= [a-z])|\n(?=[a-z0-9])")
_WORD_END = re.compile(r"[a-z](?= [a-z])")
_CUT_IN = 1_000

SHORT = 1_000
"""Characters. For shorter texts, the call that doesn't search for special tokens is faster, and it can't fail."""

_NO_SPECIAL: frozenset[str] = frozenset()


def count(encoding: tiktoken.Encoding, text: str) -> int:
    """Return the tokens of ``text``. Special tokens count as ordinary text. Lone surrogates are allowed."""
    if not text:
        return 0
    pause()
    if len(text) > PIECE:
        return sum([count(encoding, piece) for piece in _pieces(text)])
    if len(text) <= SHORT:
        return len(encoding.encode_ordinary(text))
    try:
        return _encoded_length(encoding, text)
    except ValueError:
        # A text never has more tokens than bytes.
        return len(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class TextCount:
    """Counts text as a model's provider does: the tokens of a tokenizer, times a ratio."""

    tokenizer: str
    ratio: float

    def __call__(self, text: str) -> int:
        """Return the tokens of text without a frame."""
        return self.scaled(count(encoding(self.tokenizer), text))

    def scaled(self, tokens: int) -> int:
        # Subtract a billionth so that 1.1 times 10 is 11 and not 12.
        return max(0, math.ceil(tokens * self.ratio - 1e-9))

    def unscaled(self, tokens: int) -> int:
        """Return the tokens that ``scaled`` took. The ratio must be at least 1."""
        return int((tokens + 1e-9) / self.ratio)

    def ending(self, text: str, end: str, tokens: int) -> int:
        """Return the tokens of text, of which ``end`` has unscaled ``tokens``."""
        if text == end:
            return self.scaled(tokens)
        cut = None if len(text) > PIECE else _WORD_END.search(end, 0, _CUT_IN)
        if cut is None:
            return self(text)
        start, used = text[: len(text) - len(end) + cut.end()], encoding(self.tokenizer)
        return self.scaled(count(used, start) - count(used, end[: cut.end()]) + tokens)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE:
        end = start + PIECE
        cut = _CUT.search(text, end - _CUT_IN, end)
        end = end if cut is None else cut.end()
        yield text[start:end]
        start = end
    yield text[start:]


def _encoded_length(encoding: tiktoken.Encoding, text: str) -> int:
    try:
        # The public methods make a list of the tokens, or need NumPy. The buffer's length is that in bytes.
        buffer = memoryview(encoding._core_bpe.encode_to_tiktoken_buffer(text, _NO_SPECIAL))
        return buffer.nbytes // buffer.itemsize
    except UnicodeEncodeError:
        return len(encoding.encode(text, disallowed_special=()))  # replaces lone surrogates


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


class _File(NamedTuple):
    """A file of ranks: its name in tiktoken's cache, and the SHA-256 of its content as tiktoken states it."""

    name: str
    sha256: str


_CL100K = _File(
    "9b5ad71b2ce5302211f9c61530b329a4922fc6a4", "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
)
_O200K = _File(
    "fb374d419588a4632f3f557e76b4b70aebbca790", "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
)
_P50K = _File(
    "ec7223a39ce59f226a68acc30dc1af2788490e15", "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069"
)

FILES: dict[str, _File] = {
    "cl100k_base": _CL100K,
    "o200k_base": _O200K,
    "o200k_harmony": _O200K,
    "p50k_base": _P50K,
    "p50k_edit": _P50K,
}

_loading = Lock()
_loaded: dict[str, tiktoken.Encoding] = {}


def encoding(name: str) -> tiktoken.Encoding:
    """Return the encoding. The first use loads it (0.2 to 0.4 s, 30 to 60 MB).

    Raises ``ConfigurationError`` if the name is unknown, or the file is missing or damaged.
    """
    if found := _loaded.get(name):
        return found
    path = check(name)
    with _loading:
        if name not in _loaded:
            _verify(name, path)
            with _cache_folder(path.parent):
                _loaded[name] = tiktoken.get_encoding(name)
        return _loaded[name]


def loaded(name: str) -> bool:
    """Return whether ``encoding`` returns immediately."""
    return name in _loaded


def check(name: str) -> Path:
    """Return the file of an encoding, without loading it. Raises ``ConfigurationError`` if there is none."""
    file = FILES.get(name)
    folder = tokenizers()
    if file and folder and (folder / file.name).is_file():
        return folder / file.name
    others = available()
    instead = f", or use one of {', '.join(others)}" if others else ""
    raise ConfigurationError(
        f"LiteLLM's package doesn't have the tokenizer {name!r}, and the proxy downloads nothing. "
        f"Fix: install the dependencies again, in the versions of requirements.lock{instead}."
    )


def available() -> list[str]:
    """Return the names of the encodings that can be loaded."""
    folder = tokenizers()
    return [name for name, file in FILES.items() if folder and (folder / file.name).is_file()]


def _verify(name: str, path: Path) -> None:
    # tiktoken would delete a file with unexpected content, and download it again.
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"The file of the tokenizer {name!r} can't be read: {error}. Fix: let the proxy read it."
        ) from error
    if hashlib.sha256(content).hexdigest() != FILES[name].sha256:
        raise ConfigurationError(
            f"The file of the tokenizer {name!r} is damaged ({path.name}). Fix: install the dependencies again."
        )


@contextmanager
def _cache_folder(folder: Path) -> Iterator[None]:
    """Make tiktoken read from ``folder``. It only takes the folder from the environment."""
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TIKTOKEN_CACHE_DIR"]
        else:
            os.environ["TIKTOKEN_CACHE_DIR"] = before
