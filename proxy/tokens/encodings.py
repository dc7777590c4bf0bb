"""Load tiktoken's encodings without a network.

LiteLLM's package contains some of tiktoken's files under their names in tiktoken's cache (the SHA-1 of their URL). The
proxy reads them from there. A missing encoding is a configuration error, never a download.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import tiktoken

from proxy.errors import ConfigurationError


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
    folder = _carried_folder()
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
    folder = _carried_folder()
    return [name for name, file in FILES.items() if folder and (folder / file.name).is_file()]


@cache
def _carried_folder() -> Path | None:
    # Don't import LiteLLM, which takes seconds.
    spec = find_spec("litellm")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) / "litellm_core_utils" / "tokenizers" if folders else None


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
