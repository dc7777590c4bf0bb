"""Items of the Responses API: their checks, their sizes, and their events in a stream."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.kit.upstream import text_tokens

Item = dict[str, Any]

PER_ITEM = 4
PICTURE_TOKENS = 425
REASONING = "reasoning"
CALLS = ("function_call", "custom_tool_call")
ANSWERED_BY = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "local_shell_call": "local_shell_call_output",
    "shell_call": "shell_call_output",
    "computer_call": "computer_call_output",
    "apply_patch_call": "apply_patch_call_output",
    "tool_search_call": "tool_search_output",
    "program": "program_output",
    "future_call": "future_call_output",
}
"""The outputs of calls. The last is a type that the proxy can't know."""
ID_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc", "function_call_output": "fc"}


class Refused(Exception):
    """A request that the stand-in rejects, with the status and the fields of the error."""

    def __init__(self, message: str, param: str | None = "input", code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}


def kind_of(item: Mapping[str, Any]) -> str:
    """Return the type of an item. A message may omit it."""
    return str(item.get("type") or "message")


def not_persisted(id_: str) -> Refused:
    """Return the error for an item that the server didn't store."""
    return Refused(
        f"Item with id '{id_}' not found. Items are not persisted when `store` is set to false. Try again with `store` "
        "set to true, or remove this item from your input.",
        status=404,
    )


def check_fields(number: int, item: Mapping[str, Any]) -> None:
    """Check the fields of an item. Raises ``Refused``."""
    required = {
        REASONING: ("summary",),
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
    }
    kind = kind_of(item)
    for name in required.get(kind, ()):
        if item.get(name) is None:
            raise Refused(f"Missing required parameter: 'input[{number}].{name}'.", code="missing_required_parameter")
    prefix = ID_PREFIX.get(kind)
    if item.get("id") and prefix and not item["id"].startswith(prefix):
        raise Refused(f"Invalid 'input[{number}].id': '{item['id']}'. Expected an ID that begins with '{prefix}'.")


def check_calls(items: list[Item]) -> None:
    """Check that each call has one output after it, and each output a call. Raises ``Refused``.

    A program may still run at the end, and only running programs call. Outputs of a search by the server have no id.
    """
    open_calls: dict[str, str] = {}
    asked: set[str] = set()
    for item in items:
        kind, call = kind_of(item), _call_id(item)
        caller = (item.get("caller") or {}).get("caller_id")
        if caller is not None and open_calls.get(caller) != "program":
            raise Refused(f"No running program found for {kind} with caller_id {caller}.")
        if kind in ANSWERED_BY:
            if call in open_calls:
                raise Refused(f"Duplicate call found with call_id {call}.")
            open_calls[call] = kind
        elif kind.endswith("_output"):
            if ANSWERED_BY.get(open_calls.pop(call, "")) != kind:
                raise Refused(f"No tool call found for {kind.replace('_', ' ')} with call_id {call}.")
        elif kind == "mcp_approval_request":
            asked.add(item["id"])
        elif kind == "mcp_approval_response" and item["approval_request_id"] not in asked:
            raise Refused(f"No approval request found with id {item['approval_request_id']}.")
        elif item.get("role") == "user" and open_calls:
            raise Refused(f"No tool output found for function call {min(open_calls)}.")
    if left := [call for call, kind in open_calls.items() if kind != "program"]:
        raise Refused(f"No tool output found for function call {min(left)}.")


def _call_id(item: Mapping[str, Any]) -> str:
    if item.get("execution") == "server":
        return "the server's search"
    named = item.get("call_id") or (item.get("id") if kind_of(item) == "local_shell_call_output" else None)
    return str(named)


def check_reasoning_ends(items: list[Item]) -> None:
    """Check that each reasoning item is followed by an item of the model. Raises ``Refused``."""
    for item, following in zip(items, [*items[1:], {"role": "user"}], strict=True):
        if kind_of(item) == REASONING and following.get("role") in ("user", "developer", "system"):
            raise Refused("Item of type 'reasoning' was provided without its required following item.")


def text_of(item: Mapping[str, Any]) -> str:
    """Return the text of a message or of an output."""
    content = item.get("content", item.get("output"))
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content or [] if isinstance(part, dict))


def likeness(item: Mapping[str, Any]) -> str:
    """Return an item's content, without its id, to find it again when a client sends it without one."""
    if item.get("call_id"):
        return f"{kind_of(item)} {item['call_id']}"
    return f"{item.get('role')} {text_of(item)}"


def prompt_digest(body: Mapping[str, Any], items: list[Item]) -> str:
    """Return a digest of the prompt that reasoning is bound to: no reasoning, ids, or statuses."""
    fixed = [body.get("instructions"), body.get("tools"), body.get("text")]
    parts = [_bound(item) for item in items if kind_of(item) != REASONING]
    return hashlib.sha256(json.dumps([fixed, parts], sort_keys=True).encode()).hexdigest()


def _bound(item: Mapping[str, Any]) -> Any:
    if kind_of(item) == "message":
        content = item["content"]
        parts = [content] if isinstance(content, str) else [part.get("text", part) for part in content]
        return [item["role"], parts]
    return {key: value for key, value in item.items() if key not in ("id", "status")}


def size_of(body: Mapping[str, Any], items: list[Item]) -> int:
    """Return the tokens of a request."""
    fixed = text_tokens(body.get("instructions") or "")
    fixed += sum(text_tokens(json.dumps(tool)) for tool in body.get("tools") or [])
    return fixed + sum(PER_ITEM + _item_tokens(item) for item in items)


def _item_tokens(item: Mapping[str, Any]) -> int:
    texts = [item.get(name) or "" for name in ("name", "arguments", "input")]
    sealed = len(item.get("encrypted_content") or "") * 3 // 16
    content = item.get("content", item.get("output"))
    pictures = 0
    if isinstance(content, list):
        pictures = sum(part.get("type") == "input_image" for part in content)
    return sealed + PICTURE_TOKENS * pictures + sum(text_tokens(text) for text in [*texts, text_of(item)])


def usage_of(read: int, written: int) -> dict[str, Any]:
    """Return the usage of a response. Half of the input counts as cached."""
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": read // 2, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }


def item_events(index: int, item: Item) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of an output item."""
    at = {"output_index": index, "item_id": item["id"]}
    begun = {**item, "status": "in_progress"} if "status" in item else item
    if item["type"] == "message":
        part = item["content"][0]
        empty = {**part, "text": ""}
        yield "response.output_item.added", {"output_index": index, "item": {**begun, "content": []}}
        yield "response.content_part.added", {**at, "content_index": 0, "part": empty}
        for text in _pieces(part["text"]):
            yield "response.output_text.delta", {**at, "content_index": 0, "delta": text, "logprobs": []}
        whole = {**at, "content_index": 0, "text": part["text"], "logprobs": []}
        yield "response.output_text.done", whole
        yield "response.content_part.done", {**at, "content_index": 0, "part": part}
    elif item["type"] == "function_call":
        yield "response.output_item.added", {"output_index": index, "item": {**begun, "arguments": ""}}
        for text in _pieces(item["arguments"]):
            yield "response.function_call_arguments.delta", {**at, "delta": text}
        done = {**at, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", done
    else:
        yield "response.output_item.added", {"output_index": index, "item": begun}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _pieces(text: str) -> tuple[str, ...]:
    middle = len(text) // 2
    return text[:middle], text[middle:]
