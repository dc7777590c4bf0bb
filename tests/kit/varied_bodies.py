"""Requests for Responses and Messages with every kind of item, block, and field, in every spelling that JSON allows.

Kinds and fields that nobody has documented are among them. ``odd_bodies`` has those for chat completions.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import anthropic.types.beta as beta_types
from openai.types.responses import response_input_item_param as item_types
from openai.types.responses import tool_param

from tests.kit.odd_bodies import SLOT, VALUES, generated, hand_written, space, value
from tests.kit.sdk_types import planted, variants


class Spelled(str):
    """JSON that is written as it is."""

    __slots__ = ()


def bodies(api: str) -> list[tuple[str, str]]:
    """Return the names and texts of an API's bodies. ``SLOT`` in a text is the place for a ``stream`` field."""
    if api == "chat":
        return [(f"chat {at}", body) for at, body in enumerate([*hand_written(), *generated(100)])]
    made = {"responses": _responses, "messages": _messages}[api]()
    return [(name, _text(body, random.Random(f"{api} {name}"))) for name, body in made]


def spelled(value: Any, dice: random.Random) -> str:
    """Return a value as JSON with white space, escapes, and an order of keys by chance."""
    if isinstance(value, Spelled):
        return value
    if isinstance(value, str):
        return '"' + "".join(_character(character, dice) for character in value) + '"'
    if isinstance(value, Mapping):
        fields = [f"{spelled(key, dice)}{space(dice)}:{space(dice)}{spelled(one, dice)}" for key, one in value.items()]
        dice.shuffle(fields)
        return "{" + space(dice) + f"{space(dice)},{space(dice)}".join(fields) + space(dice) + "}"
    if isinstance(value, Sequence):
        return "[" + space(dice) + f",{space(dice)}".join(spelled(one, dice) for one in value) + space(dice) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _text(body: Mapping[str, Any], dice: random.Random) -> str:
    text = spelled(body, dice)
    opening = text.index("{") + 1
    return text[:opening] + SLOT + text[opening:]


def _character(character: str, dice: random.Random) -> str:
    if character in '"\\':
        return "\\" + character
    if character == "/":
        return dice.choice(("/", "\\/"))
    if ord(character) < 32 or dice.random() < (0.02 if character.isascii() else 0.5):
        units = character.encode("utf-16-be")
        return "".join(f"\\u{units[at]:02x}{units[at + 1]:02X}" for at in range(0, len(units), 2))
    return character


TEXT = 'Grüße 👩🏽‍🚀 / "quoted" \\ e\u0301\u2028\n\tdone'

SCHEMA = {
    "type": "object",
    "properties": {"é": {"const": Spelled("-0.0")}, "b": {"type": "number", "maximum": Spelled("1e400")}},
    "required": ["b"],
    "$defs": {},
    "additionalProperties": False,
}


def _values(unknown: dict[str, Any], *declared: Any) -> list[Any]:
    """Return values of all types in the SDKs' declarations, and one that nobody has documented.

    Documents that count by the page are left out, because the proxy may send a large request again.
    """
    values = [value for one in declared for _, value in variants(one)]
    return [*(planted(value, TEXT) for value in values if not _PAGES.search(json.dumps(value))), unknown]


_PAGES = re.compile(r'"source": \{[^{}]*"type": "(?:url|file|base64)"[^{}]*\}, "type": "document"')

ITEMS = _values({"type": "telepathy_call", "of": [None, Spelled("1.0")]}, item_types.ResponseInputItemParam)
TOOLS = _values({"type": "telepathy", "range": Spelled("1E+2")}, tool_param.ToolParam)
BLOCKS = _values(
    {"type": "telepathy", "of": [None, Spelled("1.0")]},
    beta_types.BetaContentBlockParam,
)
MESSAGES_TOOLS = _values({"type": "telepathy_20301231", "name": "telepathy"}, beta_types.BetaToolUnionParam)


RESPONSES_FIELDS: tuple[dict[str, Any], ...] = (
    {"input": TEXT},
    {"input": ""},
    {"input": None},
    {"input": []},
    {"input": [{}, "a string", 7, None]},
    {"instructions": TEXT},
    {"instructions": None},
    {"instructions": [{"role": "developer", "content": TEXT}]},
    {"store": False, "include": ["reasoning.encrypted_content", "unknown.thing"]},
    {"store": None, "previous_response_id": None, "conversation": None},
    {"previous_response_id": "resp_unknown"},
    {"conversation": {"id": "conv_1"}},
    {"background": False, "truncation": "disabled"},
    {"truncation": "auto"},
    {"reasoning": {"effort": "xhigh", "summary": "auto", "unknown": None}},
    {"reasoning": None, "temperature": Spelled("1.0"), "top_p": Spelled("9.99999999999999999e-1")},
    {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}, "verbosity": "low"}},
    {"text": {"format": {"type": "json_object"}}},
    {"metadata": {"z": "1", "é": None}, "user": "a\x00b", "safety_identifier": "s"},
    {"prompt": {"id": "pmpt_1", "version": "2", "variables": {"v": {"type": "input_text", "text": TEXT}}}},
    {"max_output_tokens": 16, "max_tool_calls": Spelled("3e0")},
    {"max_output_tokens": None, "parallel_tool_calls": False, "service_tier": "flex"},
    {"prompt_cache_key": TEXT, "prompt_cache_retention": "24h", "prompt_cache_options": {"x": []}},
    {"stream_options": {"include_obfuscation": False, "x": {}}},
    {"context_management": [{"type": "compaction", "compact_threshold": 200_000}]},
    {"tool_choice": "required", "tools": [TOOLS[0]]},
    {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "s"}]}},
    {"tool_choice": {"type": "web_search"}, "top_logprobs": 20},
    {"tools": list(TOOLS)},
    {"tools": None},
    {"tools": [TOOLS[7]], "betas": ["unknown-2026-01-01"]},
    {"container": {"id": "cntr_1"}, "moderation": None, "agents": [{"name": "é"}]},
    {"messages": [{"role": "user", "content": "the field of another API"}]},
)


def _responses() -> Iterator[tuple[str, dict[str, Any]]]:
    hello = {"role": "user", "content": "hi"}
    plain = {"model": "gpt-5", "input": [hello]}
    yield from ((f"item {at}", {**plain, "input": [hello, item, hello]}) for at, item in enumerate(ITEMS))
    yield from ((f"last item {at}", {**plain, "input": [item]}) for at, item in enumerate(ITEMS[::3]))
    yield from ((f"tool {at}", {**plain, "tools": [tool]}) for at, tool in enumerate(TOOLS))
    yield from ((f"fields {at}", {**plain, **fields}) for at, fields in enumerate(RESPONSES_FIELDS))
    yield from ((f"value {at}", {**plain, "odd": Spelled(one)}) for at, one in enumerate(VALUES))
    for at in range(50):
        dice = random.Random(at)
        items = [hello, *dice.sample(ITEMS, 9)]
        fields = {name: one for some in dice.sample(RESPONSES_FIELDS[4:], 3) for name, one in some.items()}
        yield f"mixed {at}", {**plain, "input": items, **fields, f"x_{at}": Spelled(value(dice, 4))}


MESSAGES_FIELDS: tuple[dict[str, Any], ...] = (
    {"messages": []},
    {"messages": None},
    {"messages": ["odd", None, {"role": 4, "content": 3}, {"role": "user", "content": [], "extra": [1]}]},
    {"system": ""},
    {"system": None},
    {"system": TEXT},
    {"system": [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}, {"type": "odd"}]},
    {"max_tokens": Spelled("1e3")},
    {"max_tokens": None},
    {"thinking": {"type": "enabled", "budget_tokens": 1_024}, "temperature": Spelled("1.0")},
    {"thinking": {"type": "adaptive", "display": "omitted", "block_binding": {"prefix_mismatch_behavior": "x"}}},
    {"thinking": {"type": "disabled"}, "top_k": 40, "top_p": Spelled("0.90")},
    {"metadata": {"user_id": "user_é", "x": None}},
    {"stop_sequences": ["\n\n", "A", ""]},
    {"service_tier": "standard_only", "inference_geo": "eu"},
    {"container": "container_1"},
    {"container": {"id": None, "skills": [{"type": "anthropic", "skill_id": "pdf", "version": "latest"}]}},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"value": Spelled("3.0")}}]}},
    {"context_management": {"edits": [{"type": "compact_20260112", "pause_after_compaction": True}]}},
    {"mcp_servers": [{"type": "url", "url": "https://example.test", "name": "s", "authorization_token": None}]},
    {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    {"output_config": {"effort": "max", "format": {"type": "json_schema", "schema": SCHEMA}}},
    {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": [MESSAGES_TOOLS[0]]},
    {"tool_choice": {"type": "tool", "name": "f"}},
    {"tool_choice": None, "tools": []},
    {"tools": list(MESSAGES_TOOLS)},
    {"cache_control": {"type": "ephemeral"}, "speed": "fast"},
    {"betas": ["unknown-2026-01-01"], "anthropic_version": "bedrock-2023-05-31"},
    {"thread": {"create": True}},
    {"input": "the field of another API", "fallbacks": [{"model": "b"}]},
)


def _messages() -> Iterator[tuple[str, dict[str, Any]]]:
    hello = {"role": "user", "content": "hi"}
    plain = {"model": "claude-sonnet-4-5", "max_tokens": 64, "messages": [hello]}

    def turns(role: str, block: Any) -> dict[str, Any]:
        return {**plain, "messages": [hello, {"role": role, "content": [block, {"type": "text", "text": "x"}]}, hello]}

    yield from ((f"block {at}", turns(("user", "assistant")[at % 2], one)) for at, one in enumerate(BLOCKS))
    yield from (
        (f"last block {at}", {**plain, "messages": [{"role": "user", "content": [one]}]})
        for at, one in enumerate(BLOCKS[::6])
    )
    yield from ((f"tool {at}", {**plain, "tools": [tool]}) for at, tool in enumerate(MESSAGES_TOOLS))
    yield from ((f"fields {at}", {**plain, **fields}) for at, fields in enumerate(MESSAGES_FIELDS))
    yield from ((f"value {at}", {**plain, "odd": Spelled(one)}) for at, one in enumerate(VALUES))
    for at in range(50):
        dice = random.Random(at)
        said = [{"role": role, "content": dice.sample(BLOCKS, 4)} for role in ("user", "assistant", "user")]
        fields = {name: one for some in dice.sample(MESSAGES_FIELDS[2:], 3) for name, one in some.items()}
        yield f"mixed {at}", {**plain, "messages": said, **fields, f"x_{at}": Spelled(value(dice, 4))}
