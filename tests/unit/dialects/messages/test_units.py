"""How the engine reads and rewrites the units of a Messages conversation."""

import json
from typing import Any

import pytest

from proxy.compaction.turn import Turn
from proxy.dialects.messages.counting import MessagesCounter
from proxy.dialects.repair import NO_RESULT, STRAY_RESULT
from proxy.limits.profiles import Profile

PROFILE = Profile("claude-opus-5-5", tokenizer="o200k_base", images="claude", tools="claude")
COUNTER = MessagesCounter(PROFILE)
FORMAT = COUNTER.format
MARK = {"cache_control": {"type": "ephemeral"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo" * 9}}
THINKING = {"type": "thinking", "thinking": "secret plan", "signature": "c2ln"}
USE = {"type": "tool_use", "id": "t1", "name": "write_file", "input": {"path": "a.py", "content": "x" * 900}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(*blocks: Any) -> bytes:
    return json.dumps({"role": "user", "content": list(blocks)}).encode()


def assistant(*blocks: Any) -> bytes:
    return json.dumps({"role": "assistant", "content": list(blocks)}).encode()


def result(content: Any, id_: str = "t1", **more: Any) -> bytes:
    return user({"type": "tool_result", "tool_use_id": id_, "content": content, **more})


def content(raw: bytes) -> Any:
    return json.loads(raw)["content"]


def test_a_breakpoint_changes_nothing_that_plans_depend_on() -> None:
    """Clients move their breakpoints to newer messages in each request."""
    plain = FORMAT.read(user(text("go")))
    for raw in (user(text("go", **MARK)), b'{"role":"user","content":"go"}'):
        facts = FORMAT.read(raw)
        assert (facts.digest, facts.tokens) == (plain.digest, plain.tokens)
    assert FORMAT.read(result("x", **MARK)).digest == FORMAT.read(result([text("x", **MARK)])).digest


@pytest.mark.parametrize("unsigned", [{}, {"signature": ""}, {"signature": None}])
def test_thinking_without_a_signature_stays_with_its_calls(unsigned: dict[str, Any]) -> None:
    thinking = {"type": "thinking", "thinking": "I look.", **unsigned}
    unit = assistant(thinking, USE)
    assert FORMAT.without_reasoning(unit) is unit
    called = json.loads(FORMAT.single_calls(unit)[USE["id"]])["content"]
    assert [block["type"] for block in called] == ["thinking", "tool_use"]
    assert json.loads(FORMAT.without_reasoning(assistant(thinking, THINKING, USE)))["content"] == [USE]
    assert FORMAT.without_reasoning(assistant({**thinking, "thinking": ""})) == b""


def test_reasoning_is_removed_without_the_rest() -> None:
    assert content(FORMAT.without_reasoning(assistant(THINKING, text("I write."), USE))) == [text("I write."), USE]
    assert FORMAT.without_reasoning(assistant(THINKING)) == b""
    raw = assistant(text("x"))
    assert FORMAT.without_reasoning(raw) is raw
    assert FORMAT.binds_reasoning == "always"
    assert MessagesCounter(Profile("claude-opus-4-5")).format.binds_reasoning == "never"


def test_what_a_program_added_isnt_the_users() -> None:
    reminder = text("<system-reminder>Be careful.</system-reminder>")
    assert FORMAT.read(user(reminder)).kind == ""
    assert FORMAT.read(user(reminder, text("go"))).kind == "user"
    assert FORMAT.user_text(user(reminder, text("go"), IMAGE)) == [("go", "[image: no longer shown]")]


def test_the_text_of_a_result_is_replaced() -> None:
    raw = result([text("long"), IMAGE, text("more")], **MARK)
    assert FORMAT.replaceable_text(raw) == "long\nmore"
    assert content(FORMAT.with_text(raw, "-")) == [
        {"type": "tool_result", "tool_use_id": "t1", "content": [text("-"), IMAGE], **MARK}
    ]
    assert content(FORMAT.with_text(result("long"), "-"))[0]["content"] == "-"
    assert content(FORMAT.with_result(raw, "-"))[0]["content"] == [text("-")]
    assert content(FORMAT.with_result(result("long"), "-"))[0]["content"] == "-"


def test_arguments_stay_an_object() -> None:
    raw = assistant(THINKING, USE)
    shorter = FORMAT.with_arguments(raw, lambda name, arguments: '{"path": "a.py"}')
    assert content(shorter) == [THINKING, {**USE, "input": {"path": "a.py"}}]
    for same in (None, "not JSON", "[1]"):
        assert FORMAT.with_arguments(raw, lambda name, arguments, same=same: same) is raw


def test_media_in_results_become_labels() -> None:
    raw = result([text("see"), {**IMAGE, **MARK}])
    assert FORMAT.media_kinds(raw)
    assert content(FORMAT.with_labels(raw, str.upper))[0]["content"] == [text("see"), text("IMAGE", **MARK)]
    assert content(FORMAT.without_media(raw))[0]["content"] == [text("see")]


def test_a_summary_of_claude_code_is_recognized() -> None:
    words = (
        "This session is being continued from a previous conversation that ran out of context. "
        "The conversation is summarized below:\nWe repaired the build."
    )
    facts = FORMAT.read(user(text("<system-reminder>x</system-reminder>"), text(words), text("And now?")))
    assert facts.rare.foreign
    assert FORMAT.user_text(user(text(words), text("And now?"))) == [("And now?", "")]


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_the_summary_is_always_the_users(role: str) -> None:
    assert json.loads(FORMAT.summary(role, "s")) == {"role": "user", "content": "s"}


def repaired(*units: bytes) -> list[Any]:
    turns = [Turn(unit, FORMAT.read(unit)) for unit in units]
    assert FORMAT.needs_repair([turn.facts for turn in turns])
    return [content(turn.raw) for turn in FORMAT.repaired(turns)]


def test_missing_results_are_inserted_and_stray_ones_quoted() -> None:
    found = repaired(user(text("go")), assistant(USE), user(text("next")), result("lost", "t9"))
    assert found == [
        [text("go")],
        [USE],
        [{"type": "tool_result", "tool_use_id": "t1", "content": NO_RESULT}],
        [text("next")],
        STRAY_RESULT + "lost",
    ]
    assert FORMAT.read(json.dumps({"role": "user", "content": found[-1]}).encode()).kind == ""


@pytest.mark.parametrize(
    "raw",
    [
        *(b"null", b"[]", b'"x"', b"{}", b'{"role":7,"content":7}', b'{"role":"user","content":[null,1,"x",[]]}'),
        *(b'{"role":"user","content":[{"type":"tool_result"}]}', b'{"role":"assistant","content":[{"type":["x"]}]}'),
        *(b'{"role":"assistant","content":[{"type":"tool_use","input":3}]}', b'{"content":' + b"[" * 900),
        b'{"role":"user","content":[{"type":"tool_result","content":{"a":1}},{"type":"image","source":null}]}',
        b'{"role":"user","content":"\\ud83d"}',
    ],
)
def test_no_shape_raises(raw: bytes) -> None:
    facts = FORMAT.read(raw)
    assert facts.tokens >= 0
    FORMAT.text(raw), FORMAT.arguments(raw), FORMAT.user_text(raw), FORMAT.foreign_summary(raw)
    FORMAT.media_kinds(raw), FORMAT.without_media(raw), FORMAT.without_reasoning(raw)
    FORMAT.with_labels(raw, str), FORMAT.with_arguments(raw, lambda name, arguments: None)
    if FORMAT.replaceable_text(raw):
        FORMAT.with_text(raw, "short")
    if facts.kind == "result":
        FORMAT.with_result(raw, "short")
        FORMAT.frame_tokens(raw, facts)
