"""Look up the profile of a model by its name.

Sources in order of precedence: the operator's profile, limits that the upstream reports, the corrections, LiteLLM's
table. The look-up tries the exact name (with its provider's prefix, then without), the normalized name, and the name
without its snapshot. The profile's ``note`` names an inexact match. An unlisted model has no limits; there is no
default.

``openai/gpt-5.2``, ``gpt-5-2``, ``GPT-5.2-2025-12-11``, ``us.openai.gpt-5.2``, and ``ft:gpt-5.2:org::id`` have the same
limits. ``plain`` removes the provider and the region, ``undated`` also the snapshot.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from cachetools import LRUCache

from proxy.limits import tables
from proxy.limits.prices import Price, provider_of
from proxy.limits.tables import FamilyRule, LimitRule, Listing, ProviderRule, family_rule, limit_rule, provider_rule

LONGEST_NAME = 200  # Names come from clients. No model has a longer name.
LONG_SUFFIX = "[1m]"  # Ends a Claude model's name that asks for its long window. Claude Code sends a header instead.

STANDARD_WINDOW, LONG_WINDOW = 200_000, 1_000_000
"""Tokens of a Claude model's window, without and with ``context-1m``, a beta of Anthropic."""

_FINE_TUNED = re.compile(r"^ft:([^:]+)(?::.*)?$")  # ft:<base>:<organisation>:<name>:<id>

# Routing hints of OpenRouter, which select a server and not another model.
_HINT = re.compile(r":(?:free|beta|extended|nitro|floor|online|thinking|exacto)$")

# Bedrock: <region>.<vendor>.<model>-v1:0, some without the colon part. In deepseek-v3, v3 belongs to the name.
_BEDROCK_VERSION = re.compile(r"(?:-v\d+:\d+|-\d+:\d+)$")
_BEDROCK_SHORT_VERSION = re.compile(r"^((?:claude|nova)-.+)-v\d$")
_BEDROCK_REGION = re.compile(r"^(?:us-gov|us|eu|apac|au|jp|ca|global)\.(?=[a-z])")
_VENDOR = re.compile(
    r"^(?:ai21|amazon|anthropic|cohere|google|meta|minimax|mistral|moonshotai|moonshot|nvidia|openai|qwen"
    r"|writer|xai|zai)\.(?=[a-z])|^databricks-"
)
_DEEPSEEK = re.compile(r"^deepseek\.(?=[rv]\d)")
_VERTEX_SUFFIX = re.compile(r"(?:-maas|@default|@latest)$")

# 5-2 and 5p2 for 5.2; not 4-0613 (a snapshot), 3-8b (a size), 4-32k (a window) or a part of 2025-08-07.
_SPLIT_VERSION = re.compile(r"(?<!\d)(?<!20\d\d-)(\d{1,2})[-p](\d{1,2})(?![0-9a-z.])(?!-\d\d(?!\d))")
_AZURE_35 = re.compile(r"^gpt-35(?=-|$)")

_DATE = re.compile(r"[-@](?:20\d{2}-\d{2}-\d{2}|20\d{6}|\d{2}-20\d{2})(?=$|-)")
_LATEST = re.compile(r"-latest$")


@lru_cache(maxsize=8192)
def plain(name: str) -> str:
    """Return the lowercase name without provider, region, routing hint, and fine-tuning. Snapshots stay."""
    name = name[:LONGEST_NAME].strip().lower().removesuffix(LONG_SUFFIX)
    if match := _FINE_TUNED.match(name.rpartition("/")[2]):
        name = match[1]
    name = _HINT.sub("", name.rpartition("/")[2])
    name = _BEDROCK_REGION.sub("", name)
    name = _DEEPSEEK.sub("deepseek-", _VENDOR.sub("", name))
    name = _VERTEX_SUFFIX.sub("", _BEDROCK_VERSION.sub("", name))
    name = _BEDROCK_SHORT_VERSION.sub(r"\1", name)
    name = _AZURE_35.sub("gpt-3.5", name.replace("@", "-"))
    return _SPLIT_VERSION.sub(r"\1.\2", name)


@lru_cache(maxsize=8192)
def undated(name: str) -> str:
    """Return the ``plain`` name without the snapshot's date and ``-latest``."""
    stripped = _LATEST.sub("", _DATE.sub("", plain(name)))
    return stripped or plain(name)


def spelling(name: str) -> str:
    """Return the lowercase name without the path before it."""
    return name.strip().rpartition("/")[2].lower()


@dataclass(frozen=True, slots=True)
class Profile:
    """The limits of a model, in its provider's tokens. ``None`` if unknown."""

    model: str
    context_window: int | None = None  # input and output together
    max_input_tokens: int | None = None  # input alone
    max_output_tokens: int | None = None
    max_bytes: int | None = None  # of a request's body
    max_messages: int | None = None  # of a request
    tokenizer: str = "o200k_base"  # a tiktoken encoding
    token_ratio: float = 1.0  # the provider's tokens per token of that encoding, 1.0 if it's the model's own
    images: str = "unknown"  # the rule for counting images
    tools: str = "typescript"  # the form of definitions in the prompt: `typescript`, `json`, or `claude`
    escapes: bool = False  # results of parallel calls enter the prompt as ASCII JSON
    strict_alternation: bool = False  # the server requires alternating user and assistant messages, user first
    reasons: bool = False  # the model takes an effort, by the table
    family: str = ""  # a model with the same habits: the operator's `like`, or the provider and the model
    price: Price | None = None  # that at the provider, if the table lists it there
    sources: Mapping[str, str] = field(default_factory=dict)  # of each field's value
    note: str | None = None  # for the operator, about an inexact match or an unknown model
    long_context: bool = False  # the client asks for the long window

    @property
    def has_limit(self) -> bool:
        return self.context_window is not None or self.max_input_tokens is not None


REMEMBERED = 2048  # bounded, because model names come from clients
_UNKNOWN = "unknown"
_OVERRIDE = "override"
_Settings = tuple[tuple[str, Any], ...]

# Providers, by LiteLLM's names, that serve their own models. Their figures are authoritative.
MAKERS = frozenset(
    {
        *("ai21", "amazon_nova", "anthropic", "codestral", "cohere", "cohere_chat", "dashscope", "deepseek", "gemini"),
        *("meta_llama", "minimax", "mistral", "moonshot", "openai", "text-completion-openai"),
        *("vertex_ai-language-models", "xai", "zai"),
    }
)

# The fields that an operator can set. ``None`` leaves a field to the look-up.
SETTINGS = (
    *("context_window", "max_input_tokens", "max_output_tokens", "max_bytes", "max_messages"),
    *("tokenizer", "images", "strict_alternation", "like"),
)
SOURCED = (
    *("context_window", "max_input_tokens", "max_output_tokens", "max_bytes", "max_messages"),
    *("tokenizer", "token_ratio", "images"),
)


@dataclass(frozen=True, slots=True)
class ReportedWindow:
    """A window in tokens, input and output together, and the field of the upstream that reports it."""

    context_window: int
    source: str


@dataclass(frozen=True, slots=True)
class _Match:
    """An entry of the table, and a note about an inexact match."""

    key: str
    listing: Listing
    note: str | None = None


@dataclass(frozen=True, slots=True)
class _Limits:
    context_window: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None


class Profiles:
    """Look up profiles. Thread-safe.

    ``table`` replaces LiteLLM's table, in the same shape. Without it the first look-up in the process reads the file
    (about 50 ms). Call ``load`` in a thread beforehand.
    """

    def __init__(self, table: Mapping[str, Any] | None = None) -> None:
        self._given = table
        self._table: Mapping[str, Listing] | None = None
        self._plain: dict[str, list[str]] = {}
        self._undated: dict[str, list[str]] = {}
        self._remembered: LRUCache[tuple[object, ...], Profile] = LRUCache(REMEMBERED)
        self._lock = Lock()

    @property
    def loaded(self) -> bool:
        return self._table is not None

    def load(self) -> Mapping[str, Listing]:
        """Return the table, read at the first call. Raises ``ConfigurationError`` if it is missing or unreadable."""
        with self._lock:
            if self._table is not None:
                return self._table
            table = tables.load() if self._given is None else tables.convert(self._given)
            self._plain, self._undated = _index(table, plain), _index(table, undated)
            self._table = table
            return table

    def find(
        self,
        model: str,
        *,
        provider: str | None = None,
        override: object = None,
        reported: ReportedWindow | None = None,
        address: str | None = None,
        long_context: bool = False,
    ) -> Profile:
        """Return the profile of ``model`` at ``provider`` (LiteLLM's name).

        ``override`` has the operator's ``SETTINGS`` as attributes. ``reported`` is the window that the upstream
        reports. ``address`` is the base URL, if known. ``long_context`` is whether the client asks for the long window.
        """
        settings = tuple((name, value) for name in SETTINGS if (value := getattr(override, name, None)) is not None)
        long_context = long_context or model.lower().endswith(LONG_SUFFIX)
        query = (model, provider, settings, reported, address, long_context)
        if len(model) > LONGEST_NAME:
            return self._build(*query)
        with self._lock:
            if profile := self._remembered.get(query):
                return profile
        profile = self._build(*query)
        with self._lock:
            self._remembered[query] = profile
        return profile

    def _build(
        self,
        model: str,
        provider: str | None,
        settings: _Settings,
        reported: ReportedWindow | None,
        address: str | None,
        long_context: bool,
    ) -> Profile:
        override = dict(settings)
        like: str = override.get("like", model)
        if like.lower().endswith(LONG_SUFFIX):
            like = like[: -len(LONG_SUFFIX)]
        match = self._match(like, provider)
        # The entry's name identifies the family better than a name stripped of its date.
        name = undated(match.key) if match else undated(like)
        sources = {**dict.fromkeys(SOURCED, _UNKNOWN), **dict.fromkeys(override.keys() & set(SOURCED), _OVERRIDE)}
        limits = _Limits()
        if match:
            limits = _limits(match, limit_rule(name), sources)
        if reported:
            limits = _reported_limits(limits, reported, limit_rule(name), sources)
        family = family_rule(name)
        if raised := long_context and family.tools == "claude" and limits.max_input_tokens in (None, STANDARD_WINDOW):
            limits = replace(limits, context_window=LONG_WINDOW, max_input_tokens=LONG_WINDOW)
            sources |= dict.fromkeys(("context_window", "max_input_tokens"), "client: context-1m")
        limits = _override_limits(limits, override, sources)
        host = None if address is None else (urlsplit(address).hostname or "")
        max_bytes, max_messages = _request_limits(provider_rule(provider, host, name), override, sources)
        tokenizer, ratio = _tokenizer(family, override, sources)
        if "images" not in override:
            sources["images"] = f"corrections: {family.name}"
        sold = match and provider is not None and provider_of(match.listing.provider) == provider_of(provider)
        return Profile(
            model=model,
            context_window=limits.context_window,
            max_input_tokens=limits.max_input_tokens,
            max_output_tokens=limits.max_output_tokens,
            max_bytes=max_bytes,
            max_messages=max_messages,
            tokenizer=tokenizer,
            token_ratio=ratio,
            images=override.get("images", family.images),
            tools=family.tools,
            escapes=family.escapes,
            strict_alternation=bool(override.get("strict_alternation")),
            reasons=match is not None and match.listing.reasons,
            family=str(override.get("like") or f"{provider or ''}/{model}"),
            price=match.listing.price if match and sold else None,
            sources=sources,
            note=match.note if match and not reported else self._unknown_note(like, limits),
            long_context=raised,
        )

    def _match(self, model: str, provider: str | None) -> _Match | None:
        table = self.load()
        if len(model) > LONGEST_NAME:
            return None
        for key in (f"{provider}/{model}", model) if provider else (model,):
            listing = table.get(key)
            if listing and (listing.max_input_tokens or listing.max_output_tokens):
                return _Match(key, listing)
        for index, normalise in ((self._plain, plain), (self._undated, plain), (self._undated, undated)):
            if keys := index.get(normalise(model)):
                return _best(model, provider, keys, table)
        return None

    def _unknown_note(self, model: str, limits: _Limits) -> str | None:
        if limits.context_window or limits.max_input_tokens:
            return None  # The operator or the upstream stated the limits.
        name = undated(model)
        # Comparing an invented name with every name in the table would take tens of milliseconds.
        near = [other for other in self._undated if other[:3] == name[:3]] if name else []
        close = difflib.get_close_matches(name, near[:100], n=3, cutoff=0.6)
        hint = f"; names like it: {', '.join(close)}" if close else ""
        return f"no limits are known for {model[:80]}{hint}. State them in the model's profile"


def _index(table: Mapping[str, Listing], normalise: Any) -> dict[str, list[str]]:
    """Return the keys by normalized name, without entries that have no input limit."""
    index: defaultdict[str, list[str]] = defaultdict(list)
    for key, listing in table.items():
        if listing.max_input_tokens:
            index[normalise(key)].append(key)
    return dict(index)


def _best(model: str, provider: str | None, keys: list[str], table: Mapping[str, Listing]) -> _Match:
    """Return the entry to use among several with the same name.

    Prefer the provider's own entry, then the maker's, then the window that most providers of the model list. If the
    figure is too large, one request is refused and the proxy learns the limit. If it is too small, the proxy compacts
    conversations that don't need it.
    """
    own = [key for key in keys if provider and table[key].provider == provider]
    makers = [key for key in keys if table[key].provider in MAKERS and not key.startswith("ft:")]
    if chosen := own or makers:
        key = max(chosen, key=lambda key: (plain(key) == plain(model), plain(key) == undated(model), plain(key)))
        return _Match(key, table[key], _near_note(model, key))
    windows = Counter(table[key].max_input_tokens or 0 for key in keys)
    commonest = max(windows, key=lambda window: (windows[window], -window))
    key = next(key for key in keys if table[key].max_input_tokens == commonest)
    if len(windows) == 1:
        return _Match(key, table[key], _near_note(model, key))
    note = (
        f"{model} is listed by {len(keys)} providers with windows from {min(windows):,} to {max(windows):,}; the "
        f"commonest, {commonest:,}, is taken. State the right one in the model's profile"
    )
    return _Match(key, table[key], note)


def _near_note(model: str, key: str) -> str | None:
    if spelling(model) == spelling(key):
        return None
    return f"{model} is not listed; taken as {key.rpartition('/')[2]}"


def _limits(match: _Match, rule: LimitRule, sources: dict[str, str]) -> _Limits:
    """Return the entry's limits, corrected by its family's rule. Smaller figures in the table take precedence."""
    listed, listed_output = match.listing.max_input_tokens, match.listing.max_output_tokens
    table = f"litellm table: {match.key}"
    corrections = f"corrections: {rule.name}"
    output = smaller(listed_output, rule.max_output_tokens)
    if output is not None:
        sources["max_output_tokens"] = table if output == listed_output else corrections
    if listed is None:
        return _Limits(max_output_tokens=output)
    cap = smaller(listed, rule.max_input_tokens)
    sources["max_input_tokens"] = table if cap == listed else corrections
    if rule.kind == "shared":
        sources["context_window"] = f"{table} ({corrections})"
        return _Limits(listed, listed, output)
    window = smaller(rule.context_window, cap + output if cap and output else None)
    if window is not None:
        sources["context_window"] = corrections
    return _Limits(window, cap, output)


def _reported_limits(limits: _Limits, reported: ReportedWindow, rule: LimitRule, sources: dict[str, str]) -> _Limits:
    """Replace the table's window with the upstream's. A smaller cap on the input stays."""
    window = reported.context_window
    sources["context_window"] = reported.source
    cap, output = limits.max_input_tokens, limits.max_output_tokens
    if rule.kind == "shared" or cap is None or cap > window:
        cap = window
        sources["max_input_tokens"] = reported.source
    if output is not None and output > window:
        output = window
        sources["max_output_tokens"] = reported.source
    return _Limits(window, cap, output)


def smaller(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _override_limits(limits: _Limits, override: Mapping[str, Any], sources: dict[str, str]) -> _Limits:
    """Apply the operator's limits.

    A stated window also replaces the known input cap, and the reverse. The known figures belong together, so an old cap
    doesn't fit a new window.
    """
    window, cap, output = (override.get(name) for name in SETTINGS[:3])
    if window is not None or cap is not None:
        limits = _Limits(window, cap, limits.max_output_tokens)
        for name in ("context_window", "max_input_tokens"):
            sources[name] = _OVERRIDE if name in override else _UNKNOWN
    if output is not None:
        limits = replace(limits, max_output_tokens=output)
        sources["max_output_tokens"] = _OVERRIDE
    return limits


def _request_limits(
    rule: ProviderRule, override: Mapping[str, Any], sources: dict[str, str]
) -> tuple[int | None, int | None]:
    """Return the limits on bytes and messages: the operator's, or else the provider's published ones."""
    for name in ("max_bytes", "max_messages"):
        if name not in override and getattr(rule, name) is not None:
            sources[name] = f"corrections: {rule.name}"
    return override.get("max_bytes", rule.max_bytes), override.get("max_messages", rule.max_messages)


def _tokenizer(family: FamilyRule, override: Mapping[str, Any], sources: dict[str, str]) -> tuple[str, float]:
    stated: str | None = override.get("tokenizer")
    sources["token_ratio"] = f"corrections: {family.name}"
    if stated is None:
        sources["tokenizer"] = sources["token_ratio"]
        return family.tokenizer, family.ratio
    if stated == family.tokenizer and family.name != "unknown family":
        return stated, family.ratio
    # An operator who sets another encoding states that it is the model's own.
    sources["token_ratio"] = _OVERRIDE
    return stated, 1.0
