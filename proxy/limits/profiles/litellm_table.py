"""LiteLLM's table of models, read as a file.

Importing LiteLLM takes seconds of CPU and hundreds of megabytes. Its table is a plain JSON file in the package
directory, so the proxy reads the file without the import and keeps only the fields that it needs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from proxy.errors import ConfigurationError
from proxy.limits.profiles.prices import Price, price_from

FILE_NAME = "model_prices_and_context_window_backup.json"

# Modes of conversation models. In image, audio, and search models, which the table also lists, the numbers differ.
CONVERSATION_MODES = frozenset({None, "chat", "completion", "responses", "realtime"})


class Listing(msgspec.Struct, frozen=True, gc=False):
    """One entry, in tokens. ``None`` if the table has no usable figure.

    ``max_input_tokens`` is the table's unchanged figure. For most models it is the window that input and output share,
    for some the cap on the input alone; ``proxy.limits.profiles.corrections`` decides.
    """

    provider: str
    max_input_tokens: int | None
    max_output_tokens: int | None
    price: Price | None = None
    native_compaction: bool = False


class _Entry(msgspec.Struct, gc=False):
    """An entry in the file. The file is maintained by hand, so fields may be missing or have another type."""

    litellm_provider: Any = None
    mode: Any = None
    max_input_tokens: Any = None
    max_output_tokens: Any = None
    max_tokens: Any = None
    supports_anthropic_compaction: Any = None


def table_path() -> Path:
    """Return the path of the table. Raises ``ConfigurationError`` if LiteLLM or its table is missing."""
    spec = find_spec("litellm")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    raise ConfigurationError(
        f"LiteLLM's package doesn't have its table of models ({FILE_NAME}). "
        "Fix: install the dependencies again, in the versions of requirements.lock."
    )


def load(path: Path | None = None) -> Mapping[str, Listing]:
    """Load the table by model name. Raises ``ConfigurationError`` if that fails.

    The first call takes about 50 ms and 2 MB. Later calls return the same table, unless the file has changed.
    """
    path = path or table_path()
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"LiteLLM's table of models can't be read: {error}. "
            "Fix: install the dependencies again, in the versions of requirements.lock."
        ) from error


@lru_cache(maxsize=1)
def _read(path: Path, modified: int, size: int) -> Mapping[str, Listing]:
    """Read a version of the file, which ``modified`` (in nanoseconds) and ``size`` (in bytes) identify."""
    return convert(msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]]))


def convert(table: Mapping[str, Any]) -> dict[str, Listing]:
    """Convert a table of the same shape that is already in memory."""
    return {name: listing for name, entry in table.items() if (listing := _listing(entry))}


def _listing(fields: Mapping[str, Any]) -> Listing | None:
    entry = msgspec.convert(fields, _Entry)
    mode = entry.mode if isinstance(entry.mode, str) else None
    if mode not in CONVERSATION_MODES:
        return None
    max_output_tokens = as_tokens(entry.max_output_tokens)
    max_input_tokens = as_tokens(entry.max_input_tokens)
    if max_input_tokens is None and max_output_tokens is None:
        # The table's legend: "max_tokens" is the input limit if the entry has no other limit.
        max_input_tokens = as_tokens(entry.max_tokens)
    provider = entry.litellm_provider if isinstance(entry.litellm_provider, str) else ""
    compacts = entry.supports_anthropic_compaction is True
    return Listing(sys.intern(provider), max_input_tokens, max_output_tokens, price_from(fields, provider), compacts)


def as_tokens(value: object) -> int | None:
    """Return a positive integer, also from ``128000.0`` and ``"128000"``, or ``None`` for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        text = value.strip().replace(",", "").replace("_", "")
        value = int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if isinstance(value, int) and value > 0 else None
