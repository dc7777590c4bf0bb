"""Checks of a Messages API request: roles, tool results, breakpoints, and sizes."""

import base64
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.kit.upstream import text_tokens

Block = dict[str, Any]
Message = dict[str, Any]

PER_MESSAGE = 4
TOOLS_PROMPT = 346
MOST_BREAKPOINTS = 4
THINKING = ("thinking", "redacted_thinking")
SERVER_CALLS = ("server_tool_use", "mcp_tool_use")
TOOL_CHANGES = ("tool_addition", "tool_removal")


class Refused(Exception):
    """A request that the stand-in rejects, with the status, the kind of the error, and extra response headers."""

    def __init__(self, message: str, status: int = 400, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        kind = {400: "invalid_request_error", 401: "authentication_error", 413: "request_too_large"}[status]
        self.status = status
        self.headers = dict(headers or {})
        self.body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}


def blocks_of(message: Mapping[str, Any]) -> list[Block]:
    """Return the content of a message as blocks."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def merged(messages: Sequence[Message]) -> list[Message]:
    """Return the messages as the server reads them: neighbors with the same role become one."""
    result: list[Message] = []
    for message in messages:
        if result and result[-1]["role"] == message["role"]:
            result[-1]["content"] = [*result[-1]["content"], *blocks_of(message)]
        else:
            result.append({"role": message["role"], "content": list(blocks_of(message))})
    return result


def check_shape(body: Mapping[str, Any], *, alternate: bool) -> None:
    """Check roles and contents. Raises ``Refused``."""
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
        raise Refused("max_tokens: Field required")
    messages = body["messages"]
    if not messages:
        raise Refused("messages: at least one message is required")
    if messages[0]["role"] != "user":
        raise Refused('messages: first message must use the "user" role')
    for index, message in enumerate(messages):
        _check_message(index, message)
        if alternate and index and message["role"] == messages[index - 1]["role"]:
            raise Refused(
                'messages: roles must alternate between "user" and "assistant", but found multiple '
                f'"{message["role"]}" roles in a row'
            )
    _check_system_roles(messages)
    check_servers(messages)
    if messages[-1]["role"] == "assistant" and not _open_servers(messages):
        raise Refused(
            "This model does not support assistant message prefill. The conversation must end with a user message."
        )


def _check_message(index: int, message: Message) -> None:
    if message["role"] not in ("user", "assistant", "system"):
        raise Refused(f"messages.{index}.role: Input should be 'user' or 'assistant'")
    if not message["content"]:
        raise Refused(f"messages.{index}: all messages must have non-empty content")
    for place, block in enumerate(blocks_of(message)):
        if block["type"] == "text" and not block["text"]:
            raise Refused("messages: text content blocks must be non-empty")
        if block["type"] in THINKING and "cache_control" in block:
            name = f"messages.{index}.content.{place}.{block['type']}.cache_control"
            raise Refused(f"{name}: Extra inputs are not permitted")


def _check_system_roles(messages: Sequence[Message]) -> None:
    roles = [message["role"] for message in messages]
    for index, role in enumerate(roles):
        before = messages[index - 1]
        follows = roles[index - 1] == "user" or _is_of_server(blocks_of(before)[-1])
        if role == "system" and not (follows and roles[index + 1 : index + 2] in ([], ["assistant"])):
            raise Refused(
                f"messages.{index}: role 'system' must follow a user message and precede an assistant message"
            )


def _is_of_server(block: Block) -> bool:
    return block["type"] in SERVER_CALLS or block["type"].endswith("_tool_result")


def check_results(messages: Sequence[Message]) -> None:
    """Check that tool results follow their calls immediately and come first. Raises ``Refused``."""
    seen: set[str] = set()
    used: list[str] = []
    conversation = merged([message for message in messages if message["role"] != "system"])
    for index, message in enumerate(conversation):
        blocks = message["content"]
        leading = _leading_results(blocks)
        missing = [id_ for id_ in used if id_ not in leading]
        if missing:
            raise Refused(
                f"messages.{index - 1}: `tool_use` ids were found without `tool_result` blocks immediately after: "
                f"{', '.join(missing)}. Each `tool_use` block must have a corresponding `tool_result` block in the "
                "next message."
            )
        for place, block in enumerate(blocks):
            if block["type"] == "tool_result" and block["tool_use_id"] not in used:
                raise Refused(
                    f"messages.{index}.content.{place}: unexpected `tool_use_id` found in `tool_result` blocks: "
                    f"{block['tool_use_id']}. Each `tool_result` block must have a corresponding `tool_use` block in "
                    "the previous message."
                )
        if len(set(leading)) < len(leading):
            raise Refused(f"messages.{index}: each tool_use must have a single result")
        used = [block["id"] for block in blocks if block["type"] == "tool_use"]
        if len(set(used)) < len(used) or seen & set(used):
            raise Refused(f"messages.{index}: `tool_use` ids must be unique")
        seen.update(used)
    if used:
        last = len(conversation) - 1
        raise Refused(f"messages.{last}: `tool_use` ids were found without `tool_result` blocks: {', '.join(used)}")


def check_servers(messages: Sequence[Message]) -> None:
    """Check the calls that the server runs. They may pause or call the client, and then span messages.

    Raises ``Refused`` if a result or a call of the client's tool lacks its call, if a call that isn't of the open turn
    lacks its result, or if a system message changes tools elsewhere.
    """
    running: dict[str, int] = {}
    for index, message in enumerate(messages):
        blocks = blocks_of(message)
        results = all(block["type"] == "tool_result" for block in blocks)
        if message["role"] == "user" and running and not results:
            raise Refused(f"messages.{index}: `{min(running)}` was found without its result")
        for block in blocks:
            kind, id_ = block["type"], block.get("tool_use_id", "")
            if kind in SERVER_CALLS:
                running[block["id"]] = index
            elif kind.endswith("_tool_result") and running.pop(id_, None) is None:
                raise Refused(f"messages.{index}: unexpected `tool_use_id` found in `{kind}` blocks: {id_}")
            caller = (block.get("caller") or {}).get("tool_id")
            if kind == "tool_use" and caller is not None and caller not in running:
                raise Refused(f"messages.{index}: `caller.tool_id` {caller} doesn't name a running call")
            if kind in TOOL_CHANGES and message["role"] != "system":
                raise Refused(f"messages.{index}: `{kind}` is only allowed in system messages")
            if _is_of_server(block) and message["role"] != "assistant":
                raise Refused(f"messages.{index}: `{kind}` is only allowed in assistant messages")


def _open_servers(messages: Sequence[Message]) -> bool:
    """Return whether the last message ends with a call that the server has yet to run."""
    return bool(blocks_of(messages[-1])[-1]["type"] in SERVER_CALLS)


def _leading_results(blocks: Sequence[Block]) -> list[str]:
    found = []
    for block in blocks:
        if block["type"] != "tool_result":
            break
        found.append(block["tool_use_id"])
    return found


def check_breakpoints(body: Mapping[str, Any]) -> None:
    """Check the number of cache breakpoints. Raises ``Refused``."""
    found = sum(1 for block in _all_blocks(body) if block.get("cache_control"))
    found += bool(body.get("cache_control"))
    if found > MOST_BREAKPOINTS:
        raise Refused(f"A maximum of {MOST_BREAKPOINTS} blocks with cache_control may be provided. Found {found}.")


def _all_blocks(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from body.get("tools") or []
    if isinstance(body.get("system"), list):
        yield from body["system"]
    for message in body["messages"]:
        for block in blocks_of(message):
            yield block
            if isinstance(block.get("content"), list):
                yield from block["content"]


def check_manual_thinking(body: Mapping[str, Any]) -> None:
    """Check that with manual thinking the open tool round starts with thinking. Raises ``Refused``."""
    thinking = body.get("thinking") or {}
    if thinking.get("type") != "enabled":
        return
    if thinking["budget_tokens"] < 1_024:
        raise Refused("thinking.enabled.budget_tokens: Input should be greater than or equal to 1024")
    if thinking["budget_tokens"] >= body["max_tokens"]:
        raise Refused("`max_tokens` must be greater than `thinking.budget_tokens`.")
    messages = merged(body["messages"])
    if len(messages) < 2 or not any(block["type"] == "tool_result" for block in messages[-1]["content"]):
        return
    first = messages[-2]["content"][0]["type"]
    if first not in THINKING:
        raise Refused(
            f"messages.{len(messages) - 2}.content.0.type: Expected `thinking` or `redacted_thinking`, but found "
            f"`{first}`. When `thinking` is enabled, a final `assistant` message must start with a thinking block "
            "(preceeding the lastmost set of `tool_use` and `tool_result` blocks)."
        )


def text_of(content: Any) -> str:
    """Return the text of a message's content or of a ``system`` prompt."""
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] for block in content or [] if block["type"] == "text")


def size_of(body: Mapping[str, Any], ratio: float = 1.0) -> int:
    """Return the tokens of a request. ``ratio`` is the server's tokens per token of ``o200k_base``."""
    texts = [text_of(body.get("system")), *(_tool_text(tool) for tool in body.get("tools") or [])]
    blocks = list(_contents(body["messages"]))
    images = sum(_picture_tokens(block) for block in blocks if block["type"] == "image")
    texts += [_block_text(block) for block in blocks if block["type"] not in ("image", "tool_result")]
    fixed = images + PER_MESSAGE * len(body["messages"]) + (TOOLS_PROMPT if body.get("tools") else 0)
    return fixed + int(ratio * sum(map(text_tokens, texts)))


def _tool_text(tool: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in tool.items() if name != "eager_input_streaming"})


def _contents(messages: Sequence[Message]) -> Iterator[Block]:
    """Yield all blocks, and the blocks inside tool results."""
    for message in messages:
        for block in blocks_of(message):
            yield block
            if block["type"] == "tool_result" and block.get("content"):
                yield from blocks_of(block)


def _block_text(block: Block) -> str:
    match block["type"]:
        case "text" | "thinking" as kind:
            return str(block[kind])
        case "tool_use":
            return str(block["name"]) + json.dumps(block["input"])
        case _:
            return json.dumps(block)


def _picture_tokens(block: Block) -> int:
    width, height = struct.unpack(">II", base64.b64decode(block["source"]["data"])[16:24])
    return int(width * height // 750)
