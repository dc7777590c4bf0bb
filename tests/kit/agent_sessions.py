"""Drive the agent of ``agent_script`` through the official SDKs, over each of the three APIs."""

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai

from tests.kit.agent_script import SCHEMA, SYSTEM, TOOLS, has_picture, picture, question, result, step
from tests.kit.upstream import Reply

Style = Literal["items", "references", "stateless", "without_ids"]
"""How a client repeats a response: as its items, as references, as items with sealed reasoning, or without ids."""

_REFERENCED = ("reasoning", "message")


def chat_reply(body: dict[str, Any]) -> Reply:
    """Return the scripted model's answer to a chat request, for ``StandIn(responder=…)``.

    Pictures of results may follow the results in a user message of their own.
    """
    messages = body["messages"]
    text = _chat_text(messages[-1]) if messages[-1]["role"] == "user" else None
    newest = messages[-2] if text == "" else messages[-1]
    made = step(text, newest.get("tool_call_id"))
    return Reply(content=made.text or None, tool_calls=made.calls)


def _chat_text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def chat_session(client: openai.OpenAI, turns: int, model: str) -> Iterator[int]:
    """Send a session of this many requests. Yield the number of each after its response.

    Every second response is streamed.
    """
    functions = [{"name": name, "description": "A tool.", "parameters": SCHEMA} for name in TOOLS]
    tools = [{"type": "function", "function": function} for function in functions]
    history: list[Any] = [{"role": "system", "content": SYSTEM}]
    part = 0
    for turn in range(turns):
        if history[-1]["role"] != "tool":
            part += 1
            history.append({"role": "user", "content": _chat_question(part)})
        fixed: Any = {"model": model, "tools": tools, "messages": history, "max_tokens": 1_000}
        message, reason = _chat_message(client, stream=turn % 2 == 1, **fixed)
        calls = message.get("tool_calls") or []
        assert reason == ("tool_calls" if calls else "stop")
        history.append(message)
        for call in calls:
            content = result(call["id"], call["function"]["name"])
            history.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        yield turn


def _chat_message(client: openai.OpenAI, *, stream: bool, **fields: Any) -> tuple[dict[str, Any], str]:
    if not stream:
        choice = client.chat.completions.create(**fields).choices[0]
    else:
        with client.chat.completions.stream(**fields) as events:
            choice = events.get_final_completion().choices[0]
    message = choice.message.model_dump(mode="json", exclude_none=True)
    message.pop("parsed", None)
    for call in message.get("tool_calls") or []:
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    return message, choice.finish_reason


def _chat_question(part: int) -> Any:
    if not has_picture(part):
        return question(part)
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(part)}"}}
    return [{"type": "text", "text": question(part)}, image]


def responses_session(client: openai.OpenAI, turns: int, style: Style, model: str) -> Iterator[int]:
    """Send a session of this many requests. Yield the number of each after its response.

    Every second response is streamed.
    """
    history: list[Any] = []
    tools = [{"type": "function", "name": name, "description": "A tool.", "parameters": SCHEMA} for name in TOOLS]
    fixed: Any = {"model": model, "instructions": SYSTEM, "tools": tools, "input": []}
    if style == "stateless":
        fixed |= {"store": False, "include": ["reasoning.encrypted_content"]}
    part = 0
    for turn in range(turns):
        if not history or history[-1].get("type") != "function_call_output":
            part += 1
            history.append({"role": "user", "content": _response_question(part)})
        # The client copies `input` deeply, but sends `extra_body` unchanged.
        response = _response(client, stream=turn % 2 == 1, extra_body={"input": history}, **fixed)
        assert response.status == "completed"
        items = [item.model_dump(mode="json", exclude_unset=True) for item in response.output]
        history += [repeated for item in items if (repeated := _repeated(item, style))]
        for item in items:
            if item["type"] == "function_call":
                output = _response_result(item["call_id"], item["name"], part)
                history.append({"type": "function_call_output", "call_id": item["call_id"], "output": output})
        yield turn


def _response(client: openai.OpenAI, *, stream: bool, **fields: Any) -> Any:
    if not stream:
        return client.responses.create(**fields)
    with client.responses.stream(**fields) as events:
        return events.get_final_response()


def _repeated(item: dict[str, Any], style: Style) -> dict[str, Any] | None:
    item.pop("parsed_arguments", None)
    for content in item.get("content") or []:
        content.pop("parsed", None)
    if style == "references" and item["type"] in _REFERENCED:
        return {"type": "item_reference", "id": item["id"]}
    if style == "without_ids":
        return None if item["type"] == "reasoning" else {k: v for k, v in item.items() if k not in ("id", "status")}
    return item


def _response_question(part: int) -> Any:
    if not has_picture(part):
        return question(part)
    return [{"type": "input_text", "text": question(part)}, _response_picture(part)]


def _response_result(call_id: str, name: str, part: int) -> Any:
    text = result(call_id, name)
    if not has_picture(part):
        return text
    return [{"type": "input_text", "text": text}, _response_picture(part)]


def _response_picture(part: int) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{picture(part)}", "detail": "auto"}


def messages_session(client: anthropic.Anthropic, turns: int, model: str, **options: Any) -> Iterator[int]:
    """Send a session of this many requests with four breakpoints. Yield the number of each after its response.

    Every second response is streamed.
    """
    history: list[Any] = []
    tools: list[Any] = [{"name": name, "description": "A tool.", "input_schema": SCHEMA} for name in TOOLS]
    tools[-1]["cache_control"] = {"type": "ephemeral"}
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    fixed: Any = {"model": model, "max_tokens": 1_100, "system": system, "tools": tools, "messages": []}
    part = 0
    calls: list[Any] = []
    for turn in range(turns):
        if calls:
            content = [_message_result(call, part) for call in calls]
        else:
            part += 1
            content = _message_question(part)
        history.append({"role": "user", "content": content})
        extra = {"messages": _with_breakpoints(history)}
        message = _message(client, stream=turn % 2 == 1, extra_body=extra, **fixed, **options)
        history.append({"role": "assistant", "content": [_block(block) for block in message.content]})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        yield turn


def _message(client: anthropic.Anthropic, *, stream: bool, **fields: Any) -> Any:
    if not stream:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as events:
        return events.get_final_message()


def _block(block: Any) -> dict[str, Any]:
    fields = {
        "thinking": ("thinking", "signature"),
        "text": ("text",),
        "tool_use": ("id", "name", "input"),
    }[block.type]
    return {"type": block.type, **{name: getattr(block, name) for name in fields}}


def _message_question(part: int) -> list[Any]:
    pictures = [_message_picture(part)] if has_picture(part) else []
    return [*pictures, {"type": "text", "text": question(part)}]


def _message_result(call: Any, part: int) -> dict[str, Any]:
    content: Any = result(call.id, call.name)
    if has_picture(part):
        content = [{"type": "text", "text": content}, _message_picture(part)]
    return {"type": "tool_result", "tool_use_id": call.id, "content": content}


def _message_picture(part: int) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": picture(part)}
    return {"type": "image", "source": source}


def _with_breakpoints(history: list[Any]) -> list[Any]:
    """Return the messages with breakpoints on the newest two of the user."""
    marked = {id(message) for message in [m for m in history if m["role"] == "user"][-2:]}
    result = []
    for message in history:
        if id(message) in marked:
            last = {**message["content"][-1], "cache_control": {"type": "ephemeral"}}
            message = {**message, "content": [*message["content"][:-1], last]}
        result.append(message)
    return result
