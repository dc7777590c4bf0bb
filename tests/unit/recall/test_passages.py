"""The text of archived units of each API."""

import json
from typing import Any

import pytest

from proxy.recall.search import read


def text(unit: Any) -> str:
    return read([json.dumps(unit).encode()]).text


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ({"role": "user", "content": "Hello"}, "[1] user\nHello\n\n"),
        (
            {
                "role": "tool",
                "tool_call_id": "c",
                "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
            },
            "[1] tool\nA\nB\n\n",
        ),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
            },
            "[1] assistant\nf\n{}\n\n",
        ),
        ({"type": "function_call_output", "call_id": "c", "output": "done"}, "[1] function_call_output\ndone\n\n"),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"path": "é"}}]},
            '[1] assistant\nf\n{"path": "é"}\n\n',
        ),
        (
            {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "QUJD"}}]},
            "[1] user\n\n\n",
        ),
        (
            {"type": "reasoning", "summary": [{"text": "thought"}], "encrypted_content": "x"},
            "[1] reasoning\nthought\n\n",
        ),
    ],
)
def test_the_text_of_a_unit(unit: Any, expected: str) -> None:
    assert text(unit) == expected


def test_odd_units_have_a_text() -> None:
    found = read([b"[1, 2]", b'{"role": 5, "content": 7}', b"\xff", b'"a whole input"']).text
    assert found.count("message\n") == 3
    assert found.endswith("[4] user\na whole input\n\n")
