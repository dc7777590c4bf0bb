"""The same conversation in the forms in which clients of the three APIs write it."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from tests.kit.messages import assistant, call, result, user, words
from tests.kit.recorded import as_blocks, as_items

Units = list[dict[str, Any]]
Change = Callable[[str, Units, int], None]
"""Changes units of an API in place, to another form for each request."""

IDS = ("id", "call_id", "tool_call_id", "tool_use_id")
TEXTS = {"chat": "text", "messages": "text", "responses": "input_text"}
PICTURE = "https://bucket.s3.amazonaws.com/pictures/{}.png"


def turn(number: int) -> list[Any]:
    """Return the chat messages of one question: two parallel calls, their results, and the answer."""
    calls = [call(f"call_{number}_{which}", path=f"src/{number}{which}.py", line=number) for which in "ab"]
    return [
        user(f"Question {number}: {words(30, f'q{number}x')}"),
        {**assistant(f"I look at {number}.", *calls), "reasoning_content": words(20, f"t{number}x")},
        *(result(one["id"], f"Content of {one['id']}: {words(150, one['id'])}") for one in calls),
        assistant(f"Answer {number}: {words(40, f'a{number}x')}"),
    ]


def in_api(api: str, messages: list[Any]) -> Units:
    """Return chat messages in the form of an API, with reasoning and a picture in each question."""
    if api == "chat":
        return [_pictured(api, number, message) for number, message in enumerate(copy.deepcopy(messages))]
    if api == "messages":
        thinking = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
        made = [_pictured(api, number, message) for number, message in enumerate(as_blocks(messages))]
        for message in made:
            if message["role"] == "assistant":
                message["content"] = [thinking, *message["content"]]
        return made
    items: Units = []
    for number, listed in enumerate(as_items(messages)):
        if messages[number]["role"] == "assistant":
            items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": "c2VhbA=="})
        items += [_pictured(api, number, item) for item in listed]
    return items


def _pictured(api: str, number: int, unit: dict[str, Any]) -> dict[str, Any]:
    content = unit.get("content")
    if unit.get("role") != "user" or (isinstance(content, list) and content[0]["type"] == "tool_result"):
        return unit
    url = PICTURE.format(number)
    picture = {
        "chat": {"type": "image_url", "image_url": {"url": url}},
        "messages": {"type": "image", "source": {"type": "url", "url": url}},
        "responses": {"type": "input_image", "image_url": url},
    }[api]
    texts = content if isinstance(content, list) else [{"type": TEXTS[api], "text": content}]
    return {**unit, "content": [*texts, picture]}


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a value, without the arguments of calls."""
    if isinstance(value, dict):
        yield value
        for name, inner in value.items():
            if name != "input":
                yield from objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner)


def fresh_ids(api: str, units: Units, request: int) -> None:
    for one in objects(units):
        for name in IDS:
            if name in one:
                one[name] = f"id_{hashlib.md5(f'{one[name]} {request}'.encode()).hexdigest()}"  # noqa: S324


def ids_of_units(api: str, units: Units, request: int) -> None:
    for number, one in enumerate(units):
        one.setdefault("id", f"msg_{number}_{request}")


def signed_urls(api: str, units: Units, request: int) -> None:
    for one in objects(units):
        for name in ("url", "image_url"):
            if isinstance(one.get(name), str):
                one[name] += f"?X-Amz-Date={request}&X-Amz-Signature={request:064x}"


def signed_urls_in_results(api: str, units: Units, request: int) -> None:
    link = f"\nFile: https://h.example/f.png?sv=2&se={request}&sig={request:043}%3D and more"
    for one in objects(units):
        for name in ("content", "output"):
            if isinstance(one.get(name), str) and (one.keys() & IDS):
                one[name] += link


def transport(api: str, units: Units, request: int) -> None:
    for one in units:
        one |= {"created_at": 1_764_000_000 + request, "status": ("completed", "in_progress")[request % 2]}
        one["metadata" if api != "responses" else "annotations"] = {"request": request} if api != "responses" else []
    for one in objects(units):
        if one.get("type") in TEXTS.values():
            one["annotations"] = [] if request % 2 else None


def other_content(api: str, units: Units, request: int) -> None:
    for one in objects(units):
        for name in ("content", "output"):
            held = one.get(name)
            if isinstance(held, str) and request % 2:
                one[name] = [{"type": TEXTS[api], "text": held}]
            elif isinstance(held, list) and len(held) == 1 and "text" in held[0] and not request % 2:
                one[name] = held[0]["text"]


def empty_fields(api: str, units: Units, request: int) -> None:
    for one in objects(units):
        if "role" in one or one.get("type") == "function_call":
            one |= {"refusal": None, "name": one.get("name"), "annotations": []} if request % 2 else {"audio": None}
            if request % 3 == 0 and "role" in one:
                one |= {"tool_calls": one.get("tool_calls") or [], "content": one.get("content") or ""}


def key_order(api: str, units: Units, request: int) -> None:
    for one in list(objects(units)):
        fields = sorted(one.items(), reverse=bool(request % 2))
        one.clear()
        one.update(fields)


def no_reasoning(api: str, units: Units, request: int) -> None:
    last = max(index for index, one in enumerate(units) if one.get("role") == "user")
    old = units[:last]
    for one in old:
        one.pop("reasoning_content", None)
        if isinstance(one.get("content"), list):
            one["content"] = [part for part in one["content"] if part.get("type") != "thinking"]
    units[:last] = [one for one in old if one.get("type") != "reasoning"]


def spaces(api: str, units: Units, request: int) -> None:
    for one in objects(units):
        for name in ("content", "text", "output"):
            if isinstance(one.get(name), str) and one[name]:
                one[name] = one[name].strip() + " \n"[: request % 3]


def spaced_arguments(api: str, units: Units, request: int) -> None:
    separators = (",", ":") if request % 2 else (", ", ": ")
    for one in objects(units):
        if isinstance(one.get("arguments"), str):
            one["arguments"] = json.dumps(json.loads(one["arguments"]), separators=separators)


def stamped(api: str, units: Units, request: int) -> None:
    """Put a time before each user message, as after a restart of Open WebUI or SillyTavern."""
    for number, one in enumerate(units):
        parts = one.get("content")
        if one.get("role") == "user" and isinstance(parts, list) and "text" in parts[0]:
            parts[0]["text"] = f"[2026-11-29 10:{number:02}] {parts[0]['text']}"


def windows_lines(api: str, units: Units, request: int) -> None:
    for one in objects(units):
        for name in ("content", "text", "output"):
            if isinstance(one.get(name), str):
                one[name] = one[name].replace(": ", ":\r\n")


def one_after_another(api: str, units: Units, request: int) -> None:
    """Put each result behind its call, as clients do that store calls in rows."""
    made: Units = []
    for unit in units:
        blocks = unit.get("content")
        blocks = blocks if isinstance(blocks, list) else []
        results = [{**unit, "content": [one]} for one in blocks if one.get("type") == "tool_result"]
        calls = [one for one in blocks if one.get("type") == "tool_use"]
        if results or unit.get("type") == "function_call_output" or "tool_call_id" in unit:
            for result in results or [unit]:
                made.insert(_after_call(made, result), result)
        elif len(calls) > 1:
            made += [{**unit, "content": [one for one in blocks if one not in calls] + calls[:1]}]
            made += [{**unit, "content": [one]} for one in calls[1:]]
        elif len(unit.get("tool_calls") or ()) > 1:
            first, *rest = unit["tool_calls"]
            made += [{**unit, "tool_calls": [first]}]
            made += [{"role": "assistant", "content": None, "tool_calls": [one]} for one in rest]
        else:
            made.append(unit)
    units[:] = made


def _after_call(made: Units, result: dict[str, Any]) -> int:
    id = next(one[name] for one in objects(result) for name in IDS[1:] if name in one)
    return 1 + next(at for at, unit in enumerate(made) if f'"{id}"' in json.dumps(unit))


CHANGES: tuple[Change, ...] = (
    fresh_ids,
    ids_of_units,
    signed_urls,
    signed_urls_in_results,
    transport,
    other_content,
    empty_fields,
    key_order,
    no_reasoning,
    spaces,
    spaced_arguments,
)
