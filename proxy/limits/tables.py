"""LiteLLM's table of models, and corrections to it: enforced limits, and the tokenizer of each family.

``corrections.toml`` has the corrections, each with the source of its figures. Patterns match the whole name as
``profiles.undated`` returns it.

Importing LiteLLM takes seconds of CPU and hundreds of megabytes. Its table is a plain JSON file in the package
directory, so the proxy reads the file without the import and keeps only the fields that it needs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import msgspec.toml

from proxy.errors import ConfigurationError
from proxy.limits.prices import Price, price_from
from proxy.litellm_package import TABLE, table


class _Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A row of ``corrections.toml``, which describes the fields."""

    name: str
    pattern: str = ".*"

    def fits(self, undated: str) -> bool:
        # Names come from clients and can contain line breaks, which the last pattern must also match.
        return re.fullmatch(self.pattern, undated, re.DOTALL) is not None


class LimitRule(_Rule, frozen=True, kw_only=True):
    """Limits of a family in tokens. ``None`` keeps the table's figure."""

    kind: Literal["cap", "shared", "separate"]
    context_window: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None


class FamilyRule(_Rule, frozen=True, kw_only=True):
    """Token counting of a family. ``ratio`` is its tokens per token of ``tokenizer``, before calibration."""

    tokenizer: str = "o200k_base"
    ratio: float = 1.0
    images: str = "unknown"
    tools: str = "json"
    escapes: bool = False


class ProviderRule(_Rule, frozen=True, kw_only=True):
    """A provider's limits: ``max_bytes`` of the request body and ``max_messages``. ``None`` if unpublished."""

    providers: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_bytes: int | None = None
    max_messages: int | None = None


class _Corrections(msgspec.Struct, frozen=True):
    limits: tuple[LimitRule, ...]
    providers: tuple[ProviderRule, ...]
    families: tuple[FamilyRule, ...]


CORRECTIONS = msgspec.toml.decode(Path(__file__).with_name("corrections.toml").read_bytes(), type=_Corrections)


def limit_rule(undated: str) -> LimitRule:
    """Return the rule for a family's limits. The last rule matches every name."""
    return next(rule for rule in CORRECTIONS.limits if rule.fits(undated))


def family_rule(undated: str) -> FamilyRule:
    """Return the rule for a family's token counting. The last rule matches every name."""
    return next(rule for rule in CORRECTIONS.families if rule.fits(undated))


NO_PROVIDER = ProviderRule(name="no provider")


def provider_rule(provider: str | None, host: str | None, undated: str) -> ProviderRule:
    """Return the rule for a provider's limits. ``host`` is the configured host, ``None`` for the provider's default.

    A host in the table takes precedence over the provider. At any other host, ``openai`` only names the protocol.
    """
    if host is not None:
        for rule in CORRECTIONS.providers:
            if any(host == end or host.endswith(f".{end}") for end in rule.hosts) and rule.fits(undated):
                return rule
        if provider == "openai":
            return NO_PROVIDER
    found = (rule for rule in CORRECTIONS.providers if provider in rule.providers and rule.fits(undated))
    return next(found, NO_PROVIDER)


# Modes of conversation models. In image, audio, and search models, which the table also lists, the numbers differ.
CONVERSATION_MODES = frozenset({None, "chat", "completion", "responses", "realtime"})


class Listing(msgspec.Struct, frozen=True, gc=False):
    """One entry, in tokens. ``None`` if the table has no usable figure."""

    provider: str
    max_input_tokens: int | None  # the table's figure: for most models the window, for some the cap on the input alone
    max_output_tokens: int | None
    entry: msgspec.Raw = msgspec.Raw(b"{}")  # the JSON in the file

    @property
    def reasons(self) -> bool:
        """Return whether the table says that the model takes an effort of reasoning."""
        return msgspec.json.decode(self.entry).get("supports_reasoning") is True

    @property
    def price(self) -> Price | None:
        """Return the price, which is read each time: few entries are looked up."""
        return price_from(msgspec.json.decode(self.entry), self.provider)


class _Entry(msgspec.Struct, gc=False):
    """An entry in the file. The file is maintained by hand, so fields may be missing or have another type."""

    litellm_provider: Any = None
    mode: Any = None
    max_input_tokens: Any = None
    max_output_tokens: Any = None
    max_tokens: Any = None


def table_path() -> Path:
    """Return the path of the table. Raises ``ConfigurationError`` if LiteLLM or its table is missing."""
    if (path := table()) is not None:
        return path
    raise ConfigurationError(
        f"LiteLLM's package doesn't have its table of models ({TABLE}). "
        "Fix: install the dependencies again, in the versions of requirements.lock."
    )


def load(path: Path | None = None) -> Mapping[str, Listing]:
    """Load the table by model name, again if the file has changed. Raises ``ConfigurationError`` if that fails."""
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
    return _converted(path.read_bytes())


def convert(table: Mapping[str, Any]) -> dict[str, Listing]:
    """Convert a table of the same shape that is already in memory."""
    return _converted(msgspec.json.encode(table))


def _converted(table: bytes) -> dict[str, Listing]:
    entries = msgspec.json.decode(table, type=dict[str, msgspec.Raw])
    return {name: listing for name, entry in entries.items() if (listing := _listing(entry))}


_ENTRIES = msgspec.json.Decoder(_Entry)


def _listing(raw: msgspec.Raw) -> Listing | None:
    entry = _ENTRIES.decode(raw)
    mode = entry.mode if isinstance(entry.mode, str) else None
    if mode not in CONVERSATION_MODES:
        return None
    max_output_tokens = as_tokens(entry.max_output_tokens)
    max_input_tokens = as_tokens(entry.max_input_tokens)
    if max_input_tokens is None and max_output_tokens is None:
        # The table's legend: "max_tokens" is the input limit if the entry has no other limit.
        max_input_tokens = as_tokens(entry.max_tokens)
    provider = entry.litellm_provider if isinstance(entry.litellm_provider, str) else ""
    return Listing(sys.intern(provider), max_input_tokens, max_output_tokens, raw)


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
