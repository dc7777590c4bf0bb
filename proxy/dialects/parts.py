"""The table of parts: what each type of message, item, content block, and tool is, for each API.

A row says which part a type plays, which fields have text, which texts may be shortened in place, how calls and answers
are paired, and what it puts into effect. A type without a row is ``OPAQUE``: the assistant's, read as its strings,
paired by any id that another part has, and never shortened, rewritten, or dropped from a part that is kept. A test
compares the table with the types of the official SDKs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from proxy.tokens.media import MEDIA_LABELS

Plays = Literal[
    "message", "text", "said", "media", "call", "answer", "hosted", "reasoning", "reference", "prefix", "system"
]
"""``text``: has its text in ``text``. ``said``: the user's words in another field. ``call`` and ``answer``: run by the
client. ``hosted``: the assistant's, such as what the provider runs. ``prefix``: it replaces everything before it."""

Effect = Literal["", "loads", "changes", "sets"]
"""``loads``: the part names tools that it makes available. ``changes``: it adds or removes one. ``sets``: each of its
settings holds until the next part that has it."""

_HERE: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A row.

    - ``reads``: the fields with text, in order. ``None``: every string outside of ``SILENT`` fields. The first
      field of an answer has its content.
    - ``cuts``: the texts that may be shortened, as paths through objects and lists. ``*``: all of
      their values. The text parts of a list are one text.
    - ``by`` and ``values``: the path of a value that selects another row.
    - ``arguments``: the field of a call's arguments. ``answer``: the type of the part that answers it.
    - ``plain``: whether an answer with a string alone is valid.
    - ``alike``: whether every upstream counts its text alike, so that reported usage shows how one does.
    - ``effect``: what outlives the summary of the part. See ``Effect``.
    """

    plays: Plays = "hosted"
    reads: tuple[str, ...] | None = None
    cuts: tuple[str, ...] = ()
    by: str = ""
    values: Mapping[str, Part] = field(default_factory=dict)
    arguments: str = ""
    answer: str = ""
    plain: bool = False
    alike: bool = False
    effect: Effect = ""


Table = Mapping[str, Part]

OPAQUE = Part()

SEALED = frozenset({"encrypted_content", "encrypted_index", "encrypted_stdout", "signature", "thought_signature"})
"""Fields with data that only the provider reads. They count by their length."""

UNCOUNTED = frozenset(
    {
        *("type", "id", "call_id", "tool_use_id", "tool_call_id", "status", "phase", "caller", "fingerprint"),
        *("cache_control", "prompt_cache_breakpoint", "citations", "annotations", "logprobs", "index"),
    }
)
"""Fields that don't reach the model, or that the frame of a part already counts."""

SILENT = SEALED | UNCOUNTED | {"role", "page_age"}
"""Fields without text for the model, if a row doesn't name its fields."""

_TEXT = Part(plays="text", reads=("text",), cuts=("text",), alike=True)
_MEDIA = {kind: Part(plays="media", reads=_HERE) for kind in MEDIA_LABELS}
_REFUSAL = Part(reads=("refusal",), cuts=("refusal",))
_THOUGHT = Part(plays="reasoning", reads=_HERE)


def _call(arguments: str, answer: str, *cuts: str, reads: tuple[str, ...] = (), alike: bool = False) -> Part:
    return Part(plays="call", reads=reads, cuts=cuts, arguments=arguments, answer=answer, alike=alike)


_INPUT = Part(reads=_HERE, arguments="input", cuts=("input.*",))
_ARGUMENTS = Part(arguments="arguments")


def _answer(*cuts: str, plain: bool = False, alike: bool = False) -> Part:
    return Part(plays="answer", reads=("output",), cuts=cuts, plain=plain, alike=alike)


_SOURCES = {
    "text": Part(reads=("title", "context", "source.data"), cuts=("source.data",)),
    "content": Part(reads=("title", "context", "source.content"), cuts=("source.content",)),
}
BLOCKS: Table = {
    "document": Part(plays="media", reads=("title", "context"), by="source.type", values=_SOURCES),
    "thinking": _THOUGHT,
    "redacted_thinking": _THOUGHT,
    "tool_use": _call("input", "tool_result", alike=True),
    "tool_result": Part(plays="answer", reads=("content",), cuts=("content",), plain=True, alike=True),
}
"""Blocks of the Messages API that some clients also send in chat messages."""

CHAT: Table = {
    "message": Part(plays="message", reads=("content", "refusal"), cuts=("content",)),
    "text": _TEXT,
    "input_text": _TEXT,  # of Responses, like the next one
    "output_text": _TEXT,
    "refusal": _REFUSAL,
    **_MEDIA,
    **BLOCKS,  # "thinking" is also that of servers such as Mistral's
    # Calls of tools.
    "function": Part(plays="call", reads=_HERE, arguments="function.arguments"),
    "custom": Part(plays="call", reads=_HERE, arguments="custom.input"),
}

_RAN = Part(reads=("content",), cuts=("content.stdout", "content.stderr"))

MESSAGES: Table = {
    "message": Part(plays="message", reads=("content",), cuts=("content",)),
    "text": _TEXT,
    **_MEDIA,
    **BLOCKS,
    "search_result": Part(reads=("title", "source", "content"), cuts=("content",)),
    "server_tool_use": _INPUT,
    "mcp_tool_use": _INPUT,
    "mcp_tool_result": Part(reads=("content",), cuts=("content",)),
    "web_search_tool_result": Part(reads=("content",)),
    "web_search_result": Part(reads=("title", "url")),
    "web_fetch_tool_result": Part(reads=("content",), cuts=("content.content",)),
    "web_fetch_result": Part(reads=("url", "content"), cuts=("content",)),
    "advisor_tool_result": Part(reads=("content",), cuts=("content.text",)),
    "code_execution_tool_result": _RAN,
    "bash_code_execution_tool_result": _RAN,
    "text_editor_code_execution_tool_result": Part(reads=("content",), cuts=("content.content",)),
    "tool_search_tool_result": Part(reads=("content",), effect="loads"),
    "tool_reference": Part(reads=("tool_name", "name"), effect="loads", alike=True),
    "tool_addition": Part(reads=("tool",), effect="changes"),
    "tool_removal": Part(reads=("tool",), effect="changes"),
    "mcp_tool_listing": Part(reads=("mcp_server_name", "tools")),
    "browser_state": Part(reads=("tabs", "state_changes")),
    "container_upload": Part(reads=("file_id",)),
    "fallback": Part(reads=_HERE),
    "compaction": Part(plays="prefix", reads=("content",)),
}

_TOOL_SEARCHES = {"client": _call("arguments", "tool_search_output")}
_TOOL_SEARCH_OUTPUTS = {"client": Part(plays="answer", reads=("tools",), effect="loads")}

RESPONSES: Table = {
    "message": Part(plays="message", reads=("content",), cuts=("content",), alike=True),
    "input_text": _TEXT,
    "output_text": _TEXT,
    "text": _TEXT,
    "summary_text": _TEXT,
    "reasoning_text": _TEXT,
    "refusal": _REFUSAL,
    **_MEDIA,
    "computer_screenshot": Part(plays="media", reads=_HERE),
    "function_call": _call("arguments", "function_call_output", alike=True),
    "function_call_output": _answer("output", plain=True, alike=True),
    "custom_tool_call": _call("input", "custom_tool_call_output", "input"),
    "custom_tool_call_output": _answer("output", plain=True),
    "local_shell_call": _call("action", "local_shell_call_output", "action.command.*"),
    "local_shell_call_output": _answer("output", plain=True),
    "shell_call": _call("action", "shell_call_output", "action.commands.*", reads=("environment.skills",)),
    "shell_call_output": _answer("output.stdout", "output.stderr"),
    "apply_patch_call": _call("operation", "apply_patch_call_output", "operation.diff"),
    "apply_patch_call_output": _answer("output"),
    "computer_call": _call("action", "computer_call_output", reads=("actions", "pending_safety_checks")),
    "computer_call_output": _answer(),
    "tool_search_call": Part(arguments="arguments", answer="tool_search_output", by="execution", values=_TOOL_SEARCHES),
    "tool_search_output": Part(reads=("tools",), by="execution", values=_TOOL_SEARCH_OUTPUTS, effect="loads"),
    "additional_tools": Part(plays="system", reads=("tools",), effect="loads"),
    "configuration_update": Part(plays="system", reads=("reasoning", "text"), effect="sets"),
    "reasoning": Part(plays="reasoning", reads=_HERE),
    "item_reference": Part(plays="reference", reads=_HERE),
    "program": Part(reads=("code",), cuts=("code",)),
    "program_output": Part(reads=("result",), cuts=("result",)),
    "multi_agent_call": _ARGUMENTS,
    "multi_agent_call_output": Part(reads=("action", "output"), cuts=("output",)),
    "agent_message": Part(reads=("author", "recipient", "content"), cuts=("content",)),
    "web_search_call": Part(),
    "file_search_call": Part(reads=("queries", "results"), cuts=("results.text",)),
    "code_interpreter_call": Part(cuts=("code", "outputs.logs")),
    "image_generation_call": Part(reads=("revised_prompt", "error", "size", "quality", "background", "output_format")),
    "mcp_list_tools": Part(reads=("server_label", "tools", "error")),
    "mcp_approval_request": _ARGUMENTS,
    "mcp_approval_response": Part(),
    "mcp_call": Part(arguments="arguments", cuts=("output",)),
    "compaction": Part(plays="prefix", reads=_HERE),
    "context_compaction": Part(plays="prefix", reads=_HERE),
    "compaction_trigger": Part(reads=_HERE),
}

TEXT_FIELDS = ("text", "refusal", "input_text", "output_text", "thinking", "content")
"""Fields whose string, if it stands beside no other field with text, is the text of a part."""


def _texts() -> Iterator[str]:
    for table in (CHAT, MESSAGES, RESPONSES):
        for row in table.values():
            for one in (row, *row.values.values()):
                if one.plays == "answer":
                    yield from one.reads or ()
                if one.arguments:
                    yield one.arguments.rpartition(".")[2]


NEVER_MEDIA = frozenset({*TEXT_FIELDS, *_texts()})
"""Fields whose string is text even if it looks like media: those of parts, arguments, and answers."""
