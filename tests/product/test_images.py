"""A task with pictures, and a tool loop that outgrows the window."""

from pathlib import Path

import pytest

from tests.kit.scripted import protected
from tests.kit.upstream import StandIn

PICTURE = {
    "type": "image_url",
    "image_url": {
        "url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
        "awAAAABJRU5ErkJggg=="
    },
}


@pytest.mark.parametrize(("model", "window", "pictures"), [("small-vl", 8_000, 2), ("gpt-4o", 8_000, 9)])
def test_the_text_of_the_task_stays_beside_its_pictures(model: str, window: int, pictures: int, tmp_path: Path) -> None:
    text = "Book a table. Never confirm without asking me. " * 20
    task = {"role": "user", "content": [{"type": "text", "text": text}, *[PICTURE] * pictures]}
    messages: list[object] = [task]
    for number in range(8):
        function = {"name": "f", "arguments": "{}"}
        calls = [{"id": f"c{number}", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"r{number} " * 500})
    upstream = StandIn(window=1_000_000)
    with protected(upstream, tmp_path, window, {"evict_results": None}) as caller:
        raw = caller.chat.completions.with_raw_response.create(model=model, messages=messages)  # type: ignore[arg-type]
    assert raw.headers["x-compaction"] == "compacted"
    assert "summary" in raw.headers["x-compaction-steps"]
    assert task in upstream.conversations[-1].body["messages"]
