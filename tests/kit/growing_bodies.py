"""Sessions of all three APIs whose bodies grow, fork, and are edited, with odd messages and duplicate fields."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from proxy.dialects.apis import DIALECTS

APIS = sorted(DIALECTS)
LONG = 'word \\ "quoted" é ' * 1_200
"""A text that makes a body long enough to be remembered."""


def text_message(api: str, role: str, text: str) -> Any:
    if api == "responses":
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
    return {"role": role, "content": text}


def rounds(api: str, number: int) -> list[Any]:
    """Return a turn of an agent: the message of the assistant with calls, and their results."""
    id = f"call_{number}"
    if api == "chat":
        call = {"id": id, "type": "function", "function": {"name": "f", "arguments": '{"a":[1,2]}'}}
        return [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id, "content": f"r{number}"},
        ]
    if api == "messages":
        use = [{"type": "tool_use", "id": f"{id}{part}", "name": "f", "input": {}} for part in "ab"]
        results = [{"type": "tool_result", "tool_use_id": f"{id}{part}", "content": f"r{number}"} for part in "ab"]
        return [
            {"role": "assistant", "content": use},
            {
                "role": "user",
                "content": [*results[: 1 + number % 2], *[{"type": "text", "text": "go on"}] * (number % 3)],
            },
        ]
    return [
        {"type": "reasoning", "id": f"rs_{number}", "summary": []},
        {"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": id, "output": f"r{number}"},
    ]


ODD: dict[str, list[Any]] = {
    "chat": [None, 12, "text", ["a"], {}, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    "messages": [
        {"role": "assistant", "content": [{"type": "compaction", "content": "short"}, {"type": "tool_use", "id": "x"}]},
        {"role": "system", "content": "mind this"},
        *(None, 7, []),
    ],
    "responses": [
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "compaction_trigger"},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "message", "role": "assistant", "id": "msg_2", "content": []},
        *([], None, 3, "text"),
    ],
}
"""Messages that change how the others are read, or that aren't any."""

NAMES = {"chat": "messages", "messages": "messages", "responses": "input"}


def body(
    api: str,
    messages: list[Any],
    *,
    before: str = '"model":"m"',
    after: str = ',"stream":true',
    gap: str = ",",
    ascii_only: bool = True,
) -> bytes:
    listed = gap.join(json.dumps(message, ensure_ascii=ascii_only) for message in messages)
    return f'{{{before},"{NAMES[api]}":[{listed}]{after}}}'.encode()


steps = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "grow", "odd", "edit", "rewind", "fork", "insert", "say"]),
        st.integers(0, 1_000),
        st.sampled_from([",", ",", ",", ", ", " ,\r\n\t"]),
        st.sampled_from([',"stream":true', "", ',"messages":[]', ',"input":"x"', ',"model":"z","tools":[{"a":[1]}]']),
    ),
    min_size=3,
    max_size=12,
)


@st.composite
def sessions(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """Return an API, and the bodies of a session in their order."""
    api, ascii_only = draw(st.sampled_from(APIS)), draw(st.booleans())
    messages = [text_message(api, "user", LONG)]
    old, bodies = list(messages), []
    for number, (step, place, gap, after) in enumerate(draw(steps)):
        messages, old = _next(api, messages, old, step, place, number)
        bodies.append(body(api, messages, gap=gap, after=after, ascii_only=ascii_only))
    return api, bodies


def _next(
    api: str, messages: list[Any], old: list[Any], step: str, place: int, number: int
) -> tuple[list[Any], list[Any]]:
    at = 1 + place % len(messages)
    if step == "fork":
        return old + rounds(api, 1_000 + number), messages
    if step == "odd":
        changed = [*messages, ODD[api][place % len(ODD[api])]]
    elif step == "edit":
        changed = [*messages[: at - 1], text_message(api, "user", f'{number} é"messages":[ {LONG}'), *messages[at:]]
    elif step == "rewind":
        changed = messages[:at]
    elif step == "insert":
        changed = [*messages[:at], *rounds(api, number), *messages[at:]]
    elif step == "say":
        changed = [*messages, text_message(api, "assistant", "é\\")]
    else:
        changed = messages + rounds(api, number)
    return changed, old
