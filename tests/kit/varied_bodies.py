"""Requests for Responses and Messages with every kind of item, block, and field, in every spelling that JSON allows.

Kinds and fields that nobody has documented are among them. ``odd_bodies`` has those for chat completions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.kit.odd_bodies import SLOT, VALUES, space, value

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PDF = "JVBERi0xLjQKJeLjz9MK"


class Spelled(str):
    """JSON that is written as it is."""

    __slots__ = ()


def bodies(api: str) -> list[tuple[str, str]]:
    """Return the names and texts of an API's bodies. ``SLOT`` in a text is the place for a ``stream`` field."""
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

ITEMS: tuple[Any, ...] = (
    {"role": "user", "content": ""},
    {"role": "user", "content": None},
    {"role": "user", "content": []},
    {"role": "user"},
    {"content": "no role"},
    {"role": "developer", "content": TEXT},
    {"role": "system", "content": [{"type": "input_text", "text": TEXT}]},
    {"role": "critic", "content": "an unknown role"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TEXT, "unknown": Spelled("1.10")}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}]},
    {"role": "user", "content": [{"type": "input_image", "file_id": "file-1", "detail": "original"}]},
    {"role": "user", "content": [{"type": "input_file", "filename": "é.pdf", "file_data": f"data:;base64,{PDF}"}]},
    {"role": "user", "content": [{"type": "input_file", "file_url": "https://example.test/a.pdf"}]},
    {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "UklGRiQ=", "format": "wav"}}]},
    {"role": "user", "content": [{"type": "input_hologram", "layers": [[], {}, None]}]},
    {"role": "user", "content": ["a string as a part", None, 1]},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "incomplete",
        "phase": "commentary",
        "content": [
            {
                "type": "output_text",
                "text": TEXT,
                "annotations": [{"type": "url_citation", "url": "https://example.test", "start_index": 0}],
                "logprobs": [{"token": "a", "logprob": Spelled("-0.0"), "bytes": [97]}],
            }
        ],
    },
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": TEXT}]},
    {"role": "assistant", "content": "the beginning of an answer"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAB" + "x" * 400},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": TEXT}], "content": None, "status": "completed"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": TEXT}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1e400, "y":"\\u00e9"}'},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "no JSON", "namespace": "n", "caller": {}},
    {"type": "function_call_output", "call_id": "c1", "output": TEXT},
    {"type": "function_call_output", "call_id": "orphan", "output": "no call before"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "file_id": "file-1"}]},
    {"type": "function_call_output", "output": None},
    {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": TEXT},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": TEXT},
    {"type": "item_reference", "id": "msg_unknown"},
    {"type": "item_reference", "id": "rs_unknown"},
    {"id": "msg_without_a_type"},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAAB" + "y" * 400},
    {"type": "compaction", "encrypted_content": ""},
    {"type": "compaction_trigger"},
    {
        "type": "computer_call",
        "id": "cu_1",
        "call_id": "c3",
        "status": "completed",
        "action": {"type": "click", "button": "left", "x": Spelled("1e3"), "y": Spelled("-0")},
        "pending_safety_checks": [],
    },
    {
        "type": "computer_call_output",
        "call_id": "c3",
        "output": {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{PIXEL}"},
        "acknowledged_safety_checks": [{"id": "s", "code": None, "message": None}],
    },
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": TEXT}},
    {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": [TEXT], "results": None},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": PIXEL},
    {"type": "code_interpreter_call", "id": "ci_1", "code": TEXT, "container_id": "cntr_1", "outputs": None},
    {
        "type": "local_shell_call",
        "id": "ls_1",
        "call_id": "c4",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    {"type": "local_shell_call_output", "id": "ls_1", "output": '{"stdout":"é"}'},
    {"type": "shell_call", "call_id": "c5", "action": {"commands": ["ls"], "timeout_ms": None}},
    {"type": "shell_call_output", "call_id": "c5", "output": [{"stdout": TEXT, "outcome": {"type": "timeout"}}]},
    {"type": "apply_patch_call", "call_id": "c6", "operation": {"type": "create_file", "path": "a", "diff": "+é"}},
    {"type": "apply_patch_call_output", "call_id": "c6", "status": "failed", "output": TEXT},
    {"type": "mcp_list_tools", "id": "m1", "server_label": "s", "tools": [{"name": "t", "input_schema": SCHEMA}]},
    {"type": "mcp_approval_request", "id": "m2", "server_label": "s", "name": "t", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "m2", "approve": False, "reason": None},
    {
        "type": "mcp_call",
        "id": "m3",
        "server_label": "s",
        "name": "t",
        "arguments": "{}",
        "output": TEXT,
        "error": None,
    },
    {"type": "tool_search_call", "call_id": "c7", "arguments": {"query": TEXT}},
    {"type": "tool_search_output", "call_id": "c7", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
    {"type": "configuration_update", "instructions": TEXT},
    {"type": "additional_tools", "role": "developer", "tools": []},
    {"type": "agent_message", "content": [{"type": "encrypted_content", "encrypted_content": "z"}]},
    {"type": "dream", "depth": Spelled("123456789012345678901234567890")},
    {"type": None},
    {},
    None,
    "a string as an item",
    Spelled("1.10"),
    [],
)

TOOLS: tuple[Any, ...] = (
    {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True, "defer_loading": True},
    {"type": "function", "name": "f", "parameters": None},
    {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "é"'}},
    {"type": "web_search", "filters": {"allowed_domains": ["example.test"]}, "user_location": None},
    {"type": "web_search_preview_2025_03_11", "search_context_size": "low"},
    {"type": "file_search", "vector_store_ids": ["vs_1"], "ranking_options": {"score_threshold": Spelled("0.10")}},
    {
        "type": "computer_use_preview",
        "display_width": 1024,
        "display_height": Spelled("7.68e2"),
        "environment": "linux",
    },
    {"type": "mcp", "server_label": "s", "server_url": "https://example.test/mcp", "headers": {"x": TEXT}},
    {"type": "code_interpreter", "container": {"type": "auto", "file_ids": []}},
    {"type": "image_generation", "partial_images": 2, "input_image_mask": {"file_id": "file-1"}},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "container_auto", "skills": []}},
    {"type": "apply_patch"},
    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
    {"type": "tool_search"},
    {"type": "telepathy", "range": Spelled("1E+2")},
)

RESPONSES_FIELDS: tuple[dict[str, Any], ...] = (
    {"input": TEXT},
    {"input": ""},
    {"input": None},
    {"input": []},
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


IMAGE = {"type": "base64", "media_type": "image/png", "data": PIXEL}

BLOCKS: tuple[Any, ...] = (
    {"type": "text", "text": ""},
    {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    {"type": "text", "text": TEXT, "citations": None},
    {"type": "text", "text": TEXT, "citations": [{"type": "char_location", "cited_text": TEXT, "document_index": 0}]},
    {"type": "image", "source": IMAGE},
    {"type": "image", "source": {"type": "url", "url": "https://example.test/a.png"}},
    {"type": "image", "source": {"type": "file", "file_id": "file_1"}, "unknown": Spelled("-0.0")},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}, "title": "é"},
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": TEXT}, "context": None},
    {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": TEXT}]}},
    {"type": "document", "source": {"type": "url", "url": "https://example.test"}, "citations": {"enabled": True}},
    {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": TEXT}]},
    {"type": "thinking", "thinking": TEXT, "signature": "Erc" + "B" * 300 + "=="},
    {"type": "thinking", "thinking": "", "signature": ""},
    {"type": "redacted_thinking", "data": "Emw" + "K" * 300},
    {
        "type": "tool_use",
        "id": "toolu_1",
        "name": "f",
        "input": {"x": Spelled("1e400"), "y": "é", "z": Spelled("1.10")},
    },
    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}, "caller": {"type": "direct"}},
    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": None},
    {"type": "tool_result", "tool_use_id": "toolu_1"},
    {"type": "tool_result", "tool_use_id": "toolu_1", "content": TEXT, "is_error": True},
    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": IMAGE}]},
    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "tool_reference", "tool_name": "f"}]},
    {"type": "tool_result", "tool_use_id": "orphan", "content": []},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": TEXT}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [{"type": "web_search_result", "url": "u", "encrypted_content": "x" * 300, "page_age": None}],
    },
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "web_search_tool_result_error"}},
    {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {"type": "web_fetch_result", "url": "u"}},
    {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {"stdout": TEXT, "return_code": 0}},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "s", "content": {"stdout": TEXT, "content": []}},
    {"type": "text_editor_code_execution_tool_result", "tool_use_id": "s", "content": {"lines": [TEXT]}},
    {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {"tool_references": []}},
    {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "t", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False, "content": TEXT},
    {"type": "container_upload", "file_id": "file_1"},
    {"type": "compaction", "content": TEXT},
    {"type": "compaction", "content": None, "encrypted_content": "x" * 300},
    {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
    {"type": "tool_addition", "tools": [{"name": "f", "input_schema": SCHEMA}]},
    {"type": "tool_removal", "tool_names": ["f"]},
    {"type": "hologram", "layers": [[], {}, None, Spelled("123456789012345678901234567890")]},
    {"type": None},
    {"text": "no type"},
    {},
    None,
    "a string as a block",
    Spelled("1e3"),
)

TURNS: tuple[Any, ...] = (
    {"role": "user", "content": ""},
    {"role": "user", "content": None},
    {"role": "user", "content": []},
    {"role": "user"},
    {"content": "no role"},
    {"role": "assistant", "content": "the beginning of an answer"},
    {"role": "assistant", "content": []},
    {"role": "system", "content": TEXT, "clear_at": "next_user_message"},
    {"role": "critic", "content": [{"type": "text", "text": "an unknown role"}]},
    {"role": "user", "content": TEXT, "unknown": {"deep": [Spelled("1.00")]}},
    {},
    None,
)

MESSAGES_TOOLS: tuple[Any, ...] = (
    {"name": "f", "description": TEXT, "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "f", "input_schema": SCHEMA, "strict": True, "eager_input_streaming": True},
    {"name": "f", "input_schema": SCHEMA, "defer_loading": True, "input_examples": [{"b": Spelled("1.0")}]},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5, "blocked_domains": None},
    {"type": "web_fetch_20250910", "name": "web_fetch", "citations": {"enabled": True}},
    {"type": "computer_20250124", "name": "computer", "display_width_px": Spelled("1e3"), "display_height_px": 768},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": None},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "s", "default_config": {"enabled": False}},
    {"type": "telepathy_20301231", "name": "telepathy"},
)

MESSAGES_FIELDS: tuple[dict[str, Any], ...] = (
    {"messages": []},
    {"messages": None},
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

_PARALLEL = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": [BLOCKS[12], BLOCKS[15], {**BLOCKS[15], "id": "toolu_2"}]},
    {
        "role": "user",
        "content": [BLOCKS[19], {**BLOCKS[20], "tool_use_id": "toolu_2"}, {"type": "text", "text": "and"}],
    },
]


def _messages() -> Iterator[tuple[str, dict[str, Any]]]:
    hello = {"role": "user", "content": "hi"}
    plain = {"model": "claude-sonnet-4-5", "max_tokens": 64, "messages": [hello]}

    def turns(role: str, block: Any) -> dict[str, Any]:
        return {**plain, "messages": [hello, {"role": role, "content": [block, {"type": "text", "text": "x"}]}, hello]}

    yield from ((f"block {at}", turns(("user", "assistant")[at % 2], one)) for at, one in enumerate(BLOCKS))
    yield from (
        (f"last block {at}", {**plain, "messages": [{"role": "user", "content": [one]}]})
        for at, one in enumerate(BLOCKS[::2])
    )
    yield from ((f"turn {at}", {**plain, "messages": [hello, turn]}) for at, turn in enumerate(TURNS))
    yield from ((f"tool {at}", {**plain, "tools": [tool]}) for at, tool in enumerate(MESSAGES_TOOLS))
    yield from ((f"fields {at}", {**plain, **fields}) for at, fields in enumerate(MESSAGES_FIELDS))
    yield from ((f"value {at}", {**plain, "odd": Spelled(one)}) for at, one in enumerate(VALUES))
    yield "parallel calls", {**plain, "messages": _PARALLEL}
    for at in range(50):
        dice = random.Random(at)
        said = [{"role": role, "content": dice.sample(BLOCKS, 4)} for role in ("user", "assistant", "user")]
        fields = {name: one for some in dice.sample(MESSAGES_FIELDS[2:], 3) for name, one in some.items()}
        yield f"mixed {at}", {**plain, "messages": said, **fields, f"x_{at}": Spelled(value(dice, 4))}
