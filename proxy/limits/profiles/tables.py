"""LiteLLM's table of models, and corrections to it: enforced limits, and the tokenizer of each family.

In each of the three tables of corrections the first match wins. Patterns match the whole name as ``names.undated``
returns it. Each rule gives the source of its figures. If an upstream enforces less than the model's maker, the smaller
figure in LiteLLM's table stays. ``PROVIDERS`` has limits that apply to all models of a provider: bytes and messages per
request.

Importing LiteLLM takes seconds of CPU and hundreds of megabytes. Its table is a plain JSON file in the package
directory, so the proxy reads the file without the import and keeps only the fields that it needs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from proxy.errors import ConfigurationError
from proxy.limits.profiles.prices import Price, price_from


class Kind(Enum):
    """The meaning of the table's ``max_input_tokens`` for a family."""

    INPUT_CAP = "input cap"
    """Input has its own cap; input and output together have another."""
    SHARED = "shared window"
    """Input and output share one window, and the table's figure is that window."""
    SEPARATE = "separate input and output"
    """Input and output have independent limits."""


@dataclass(frozen=True, slots=True)
class LimitRule:
    """Limits of a family in tokens. ``None`` keeps the table's figure. ``reason`` justifies the correction."""

    name: str
    pattern: re.Pattern[str]
    kind: Kind
    context_window: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FamilyRule:
    """Token counting of a family. ``ratio`` is its tokens per token of ``tokenizer``, before calibration."""

    name: str
    pattern: re.Pattern[str]
    tokenizer: str = "o200k_base"
    ratio: float = 1.0
    images: str = "unknown"
    tools: str = "json"

    @property
    def escapes(self) -> bool:
        """Return whether results of parallel calls enter the prompt as ASCII JSON (models that only OpenAI serves)."""
        return self.tools == "typescript" and self.name != "gpt-oss"


@dataclass(frozen=True, slots=True)
class ProviderRule:
    """A provider's limits: ``max_bytes`` of the request body and ``max_messages``. ``None`` if unpublished.

    ``providers`` are LiteLLM's names; ``hosts`` are suffixes of the provider's host names.
    """

    name: str
    providers: frozenset[str]
    hosts: tuple[str, ...] = ()
    pattern: re.Pattern[str] = re.compile(r".*", re.DOTALL)
    max_bytes: int | None = None
    max_messages: int | None = None


def _pattern(text: str) -> re.Pattern[str]:
    # Names come from clients and can contain line breaks, which the last pattern must also match.
    return re.compile(text, re.DOTALL)


def _input_cap(name: str, pattern: str, window: int, most_input: int, most_output: int, reason: str) -> LimitRule:
    return LimitRule(name, _pattern(pattern), Kind.INPUT_CAP, window, most_input, most_output, reason)


def _openai(name: str, pattern: str, images: str = "unknown", tokenizer: str = "o200k_base") -> FamilyRule:
    return FamilyRule(name, _pattern(pattern), tokenizer, images=images, tools="typescript")


LIMITS: tuple[LimitRule, ...] = (
    # Azure lists 111,616 as their input, which is the window minus the output. That figure stays.
    _input_cap(
        "GPT-5 chat",
        r"gpt-5(\.\d+)?-chat",
        *(128_000, 128_000, 16_384),
        reason="the chat snapshots have the window of GPT-4o (OpenAI's model pages)",
    ),
    # Listed with 272,000 input, or with 400,000 which is their whole window.
    _input_cap(
        "small or special models of GPT-5.4 and later",
        r"gpt-5\.(?:[4-9]|\d\d)-(?:mini|nano|cyber)(?:-.*)?|(?:gpt-)?daybreak-red|(?:gpt-)?chat",
        *(400_000, 272_000, 128_000),
        reason="the window is 400,000, of which 128,000 are output; 272,000 are enforced for the input",
    ),
    # The table has either figure as the input, depending on the provider.
    _input_cap(
        "GPT-5.4 and later",
        r"gpt-(?:5\.(?:[4-9]|\d\d)|6(?:\.\d+)?)(?:-.*)?|(?:gpt-)?daybreak-blue",
        *(1_050_000, 922_000, 128_000),
        reason="the window is 1,050,000, of which 128,000 are output; 922,000 are enforced for the input",
    ),
    # Also for the codex and pro models that the table lists with 400,000.
    _input_cap(
        "GPT-5 to GPT-5.3",
        r"gpt-5(?:\.[0-3])?(?:-.*)?",
        *(400_000, 272_000, 128_000),
        reason="the window is 400,000, of which 128,000 are output; 272,000 are enforced for the input",
    ),
    # Google publishes inputTokenLimit and outputTokenLimit, and enforces each separately.
    LimitRule("Gemini", _pattern(r"(?:google-)?gemini-.*"), Kind.SEPARATE),
    # GPT-3.5, GPT-4, GPT-4o, GPT-4.1, the o-series, gpt-oss, Claude, Llama, Mistral, DeepSeek, Qwen, Grok, Command, …:
    # the providers check input plus requested output against one number, and the table has that number as the input.
    LimitRule("shared window", _pattern(r".*"), Kind.SHARED),
)

# If a source says MB, the tables use the smaller reading: millions of bytes.
PROVIDERS: tuple[ProviderRule, ...] = (
    # "Invalid 'messages': array too long. Expected an array with maximum length 2048" (code array_above_max_length).
    # The 512 MB of the images guide exceed the proxy's own limit.
    ProviderRule("OpenAI", frozenset({"openai"}), ("api.openai.com",), max_messages=2_048),
    # learn.microsoft.com, Azure OpenAI quotas and limits: "Max number of /chat/completions messages 2048".
    ProviderRule("Azure OpenAI", frozenset({"azure"}), ("openai.azure.com",), max_messages=2_048),
    # docs.anthropic.com, Errors, request size limits: Messages API 32 MB (batches, which the proxy doesn't serve,
    # 256 MB). Messages API reference: "There is a limit of 100,000 messages in a single request."
    ProviderRule(
        "Anthropic", frozenset({"anthropic"}), ("api.anthropic.com",), max_bytes=32_000_000, max_messages=100_000
    ),
    # docs.aws.amazon.com, Anthropic Claude Messages API, request and response: "The maximum size of the payload you can
    # send in a request is 20MB."
    ProviderRule(
        "Claude on Bedrock",
        frozenset({"bedrock", "bedrock_converse"}),
        ("amazonaws.com",),
        _pattern(r"claude-.*"),
        max_bytes=20_000_000,
    ),
    # platform.claude.com, Claude on Vertex AI: "limits request payloads to 30 MB".
    ProviderRule(
        "Claude on Vertex AI",
        frozenset({"vertex_ai", "vertex_ai_beta"}),
        ("aiplatform.googleapis.com",),
        _pattern(r"claude-.*"),
        max_bytes=30_000_000,
    ),
    # blog.google, "Increased file size limits and expanded inputs support in Gemini API": inline data up to 100 MB.
    ProviderRule("Gemini API", frozenset({"gemini"}), ("generativelanguage.googleapis.com",), max_bytes=100_000_000),
    # The list of errors of Kimi Code: "total message size N exceeds limit 2097152"; also with images in it.
    ProviderRule("Kimi Code", frozenset(), ("api.kimi.com",), max_bytes=2_097_152, max_messages=2_048),
    ProviderRule(
        "Kimi Code",
        frozenset({"moonshot"}),
        (),
        _pattern(r"kimi-for-coding.*|k\d.*"),
        max_bytes=2_097_152,
        max_messages=2_048,
    ),
    # api.moonshot.ai returns the same sentence with 4194304, and "'$.messages' is too long. Maximum length is 2048, but
    # got 4970 items" (both recorded by clients). It is unclear whether the images guide's 100 MB also applies.
    ProviderRule(
        "Moonshot",
        frozenset({"moonshot"}),
        ("api.moonshot.ai", "api.moonshot.cn"),
        max_bytes=4_194_304,
        max_messages=2_048,
    ),
    # console.groq.com, Images and vision: 4 MB for a request with an image in Base64. Their windows hold less text than
    # that.
    ProviderRule("Groq", frozenset({"groq"}), ("api.groq.com",), max_bytes=4_000_000),
)

# Ratios are conservative starting values for English and code, until calibration from reported usage. Comments mark the
# measured ones. The others follow from the size of the vocabulary: 32K words need about a third more tokens than 100K,
# and 128K to 200K are close to o200k_base.
FAMILIES: tuple[FamilyRule, ...] = (
    # tiktoken's own map of models to encodings.
    _openai("gpt-4o-mini", r"gpt-4o-mini.*", "gpt-4o-mini"),
    _openai("gpt-4.1-mini", r"gpt-4\.1-mini.*", "gpt-4.1-mini"),
    _openai("gpt-4.1-nano", r"gpt-4\.1-nano.*", "gpt-4.1-nano"),
    _openai("gpt-4o, 4.1 and 4.5", r"gpt-4o.*|gpt-4\.[15].*|chatgpt-4o.*|gpt-audio.*|gpt-realtime.*", "gpt-4o"),
    _openai("gpt-5 mini", r"gpt-5-mini.*", "gpt-5-mini"),
    _openai("gpt-5 nano", r"gpt-5-nano.*", "gpt-5-nano"),
    _openai("later gpt-5 mini", r"gpt-5\.\d++.*-mini.*", "gpt-5.4-mini"),
    _openai("later gpt-5 nano", r"gpt-5\.\d++.*-nano.*", "gpt-5.4-nano"),
    _openai("gpt-5.2 and 5.3", r"gpt-5\.[23](?:-.*)?", "gpt-5.2"),
    _openai("gpt-5", r"gpt-5(?:\.[01])?(?:-.*)?", "gpt-5"),
    _openai(
        "gpt-5.4 and later", r"gpt-(?:5\.\d+|[6-9](?:\.\d+)?)(?:-.*)?|(?:gpt-)?daybreak-.*|(?:gpt-)?chat", "gpt-5.4"
    ),
    _openai("o4-mini", r"o4-mini.*|codex-mini.*", "o4-mini"),
    _openai("o-series", r"o[1-9](?:-.*)?", "o-series"),
    _openai("computer use", r"computer-use-.*", "computer-use"),
    # o200k_harmony: the same vocabulary with more special tokens. No images.
    _openai("gpt-oss", r"gpt-oss.*"),
    _openai("gpt-4 and gpt-3.5", r"gpt-4(?:-.*)?|gpt-3\.5.*|text-embedding-.*", "gpt-4o", "cl100k_base"),
    # Claude up to 4.6: 15 to 25 % more than o200k_base on code and prose (counted with the count_tokens endpoint in
    # public comparisons). From Opus 4.7 on a new tokenizer: 1.0 to 1.35 times that by Anthropic's migration guide,
    # up to 1.47 measured on technical prose.
    FamilyRule(
        "Claude 4.7 and later",
        _pattern(r"claude-(?:[a-z]+-)?(?:4\.[7-9]|[5-9](?:\.\d+)?)(?:-.*)?|claude-mythos.*|claude-fable.*"),
        "o200k_base",
        1.6,
        "claude-4.7",
        "claude",
    ),
    FamilyRule("Claude", _pattern(r"claude-.*"), "o200k_base", 1.25, "claude", "claude"),
    # SentencePiece with 256K words; 258 tokens per tile up to 2.5, media_resolution since 3.
    FamilyRule("Gemini 3", _pattern(r"gemini-[3-9].*"), "o200k_base", 1.1, "gemini-3"),
    FamilyRule("Gemini", _pattern(r"gemini-.*|gemma.*"), "o200k_base", 1.1, "gemini"),
    # Llama 3 extends cl100k_base from 100K to 128K words; Llama 4 has 200K; Llama 2 had 32K.
    FamilyRule("Llama 3", _pattern(r"(?:meta-)?llama-?v?3.*"), "cl100k_base", 1.05),
    FamilyRule("Llama 4", _pattern(r"(?:meta-)?llama-?v?4.*"), "o200k_base", 1.1),
    FamilyRule("Llama 2", _pattern(r"(?:meta-)?(?:code)?llama.*"), "cl100k_base", 1.4),
    # Qwen extends cl100k_base, but each digit is a separate token.
    FamilyRule("Qwen with vision", _pattern(r"qwen.*vl.*"), "cl100k_base", 1.1, "qwen-vl"),
    FamilyRule("Qwen", _pattern(r"qw[eq].*"), "cl100k_base", 1.1),
    # Tekken has 131K words, older Mistral models 32K.
    FamilyRule("Mixtral and older Mistral", _pattern(r"(?:open-)?mixtral.*|mistral-7b.*"), "o200k_base", 1.4),
    FamilyRule("Mistral", _pattern(r"(?:open-)?(?:mi|ma|co|de|pi|vo)(?:ni|gi)?(?:stral|xtral).*"), "o200k_base", 1.2),
    FamilyRule("DeepSeek", _pattern(r"deepseek.*"), "o200k_base", 1.1),
    FamilyRule("Grok", _pattern(r"grok.*"), "o200k_base", 1.1),
    FamilyRule("Kimi", _pattern(r"kimi.*|moonshot.*"), "o200k_base", 1.05),
    FamilyRule("GLM", _pattern(r"(?:zai-)?glm.*"), "o200k_base", 1.05),
    FamilyRule("Command", _pattern(r"command.*|(?:cohere-)?c4ai.*"), "o200k_base", 1.1),
    FamilyRule("Nova", _pattern(r"nova-.*"), "o200k_base", 1.2),
    FamilyRule("Phi 4", _pattern(r"phi-?4.*"), "cl100k_base", 1.05),
    FamilyRule("Phi", _pattern(r"phi.*"), "cl100k_base", 1.4),
    # Unknown: slightly above most vocabularies, until calibration.
    FamilyRule("unknown family", _pattern(r".*"), "o200k_base", 1.2),
)


def limit_rule(undated: str) -> LimitRule:
    """Return the rule for a family's limits. The last rule matches every name."""
    return next(rule for rule in LIMITS if rule.pattern.fullmatch(undated))


def family_rule(undated: str) -> FamilyRule:
    """Return the rule for a family's token counting. The last rule matches every name."""
    return next(rule for rule in FAMILIES if rule.pattern.fullmatch(undated))


NO_PROVIDER = ProviderRule("no provider", frozenset())


def provider_rule(provider: str | None, host: str | None, undated: str) -> ProviderRule:
    """Return the rule for a provider's limits. ``host`` is the configured host, ``None`` for the provider's default.

    A host in the table takes precedence over the provider. At any other host, ``openai`` only names the protocol.
    """
    if host is not None:
        for rule in PROVIDERS:
            if any(host == end or host.endswith(f".{end}") for end in rule.hosts) and rule.pattern.fullmatch(undated):
                return rule
        if provider == "openai":
            return NO_PROVIDER
    found = (rule for rule in PROVIDERS if provider in rule.providers and rule.pattern.fullmatch(undated))
    return next(found, NO_PROVIDER)


FILE_NAME = "model_prices_and_context_window_backup.json"

# Modes of conversation models. In image, audio, and search models, which the table also lists, the numbers differ.
CONVERSATION_MODES = frozenset({None, "chat", "completion", "responses", "realtime"})


class Listing(msgspec.Struct, frozen=True, gc=False):
    """One entry, in tokens. ``None`` if the table has no usable figure.

    ``max_input_tokens`` is the table's unchanged figure. For most models it is the window that input and output share,
    for some the cap on the input alone; ``proxy.limits.profiles.tables`` decides. ``entry`` is the JSON in the file.
    """

    provider: str
    max_input_tokens: int | None
    max_output_tokens: int | None
    entry: msgspec.Raw = msgspec.Raw(b"{}")

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

    The first call takes about 20 ms and 3 MB. Later calls return the same table, unless the file has changed.
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
