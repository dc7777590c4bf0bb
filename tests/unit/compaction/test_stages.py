"""Test the cheap stages, and which reads a later message supersedes."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction import keeps
from proxy.compaction.rules import Rules
from proxy.compaction.settings import Clause
from proxy.compaction.stages import ArgumentRules, ResultRules, evict_results, media, truncate_args
from proxy.compaction.stages.duplicates import Superseded, superseded_reads
from proxy.compaction.stages.stage import Stage
from proxy.compaction.turn import Turn
from proxy.dialects.chat.units import text_of
from proxy.dialects.units import decode
from tests.kit.compacting import rules
from tests.kit.conversations import (
    FORMAT,
    IMAGE,
    Counting,
    assistant,
    call,
    message_tokens,
    result,
    text_of_size,
    turn,
    turns,
)

CUT = "...(argument truncated)"
LONG = "x" * 5000
MARKER = "\n[The compaction proxy left out {lines} lines ({tokens} tokens), which were part of the result.]\n"


def argument_rules(*tools: str, max_length: int = 400) -> ArgumentRules:
    return ArgumentRules((), Clause(messages=1), max_length, CUT, tools or ("*",))


def cut_arguments(message: Any, policy: ArgumentRules | None = None) -> Turn | None:
    return truncate_args.Arguments(policy or argument_rules(), FORMAT, archive=False).reduce(0, turn(message))


def arguments_in(form: Turn, index: int = 0) -> Any:
    return json.loads(decode(form.raw)["tool_calls"][index]["function"]["arguments"])


def test_long_strings_are_cut_and_all_else_stays() -> None:
    given_ = {"path": LONG, "content": LONG, "edits": [{"old": "short", "new": LONG, "n": 1.5}], "flag": None, "é": "é"}
    form = cut_arguments(assistant(None, call("a", "write_file", **given_), call("b", "ls", path=".")))
    assert form is not None
    start = "x" * keeps.KEPT_CHARACTERS + CUT
    expected = {**given_, "content": start, "edits": [{"old": "short", "new": start, "n": 1.5}]}
    assert arguments_in(form) == expected
    assert arguments_in(form, 1) == {"path": "."}
    assert form.facts.tokens == message_tokens(decode(form.raw))


@pytest.mark.parametrize("key", sorted(truncate_args.KEPT_KEYS))
def test_values_that_say_what_a_call_was_about_stay_whole(key: str) -> None:
    assert cut_arguments(assistant(None, call("a", "t", **{key: LONG}))) is None
    assert cut_arguments(assistant(None, call("a", "t", **{key: [LONG, LONG]}))) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"text": "' + LONG,
        LONG,
        '{"a": NaN, "text": "' + LONG + '"}',
        '{"a": 1e400, "text": "' + LONG + '"}',
        '{"a": ' + "9" * 5000 + ', "text": "' + LONG + '"}',
        '{"a": ' + "[" * 700 + "]" * 700 + ', "text": "' + LONG + '"}',
        json.dumps([1] * 3000),
    ],
    ids=("cut off", "no JSON", "NaN", "infinite", "endless number", "deep", "no long string"),
)
def test_what_cannot_be_cut_as_json_is_left(text: str) -> None:
    message = assistant(None, call("a"))
    message["tool_calls"][0]["function"]["arguments"] = text
    assert cut_arguments(message) is None


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
strings = st.text(max_size=30) | st.builds(lambda c, n: c * n, st.characters(), st.sampled_from((300, 2000)))
trees = st.recursive(
    leaves | strings,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(("path", "content", "command", "new", "é")), inner, max_size=4)
    ),
    max_leaves=10,
)


def same_shape(before: Any, after: Any, key: str | None = None) -> bool:
    if isinstance(before, dict):
        return (
            isinstance(after, dict)
            and list(before) == list(after)
            and all(same_shape(before[k], after[k], k) for k in before)
        )
    if isinstance(before, list):
        pairs = isinstance(after, list) and len(before) == len(after)
        return pairs and all(same_shape(a, b, key) for a, b in zip(before, after, strict=True))
    if before == after:
        return type(before) is type(after)
    cut_here = isinstance(before, str) and len(before) > 400 and key not in truncate_args.KEPT_KEYS
    return cut_here and after == before[: keeps.KEPT_CHARACTERS] + CUT


@given(trees, trees)
def test_arguments_keep_their_shape(one: Any, other: Any) -> None:
    message = assistant("text", call("a", "t", a=one), call("b", "t", b=other))
    form = cut_arguments(message)
    if form is not None:
        assert form.facts.tokens < message_tokens(message)
        assert same_shape({"a": one}, arguments_in(form))
        assert same_shape({"b": other}, arguments_in(form, 1))
        assert {**decode(form.raw), "tool_calls": None} == {**message, "tool_calls": None}


def result_rules(max_tokens: int, *exclude: str, **per_tool: int) -> Rules:
    part = ResultRules((), Clause(messages=1), max_tokens, per_tool, exclude)
    others = rules(archive=False)
    return replace(others, stages=tuple(part if isinstance(s, ResultRules) else s for s in others.stages))


def made(module: Any, body: list[Turn], policy: Rules, count: Any = FORMAT) -> Stage:
    return next(stage for stage in policy.applied_to(body, count) if stage.name == module.NAME)


def shorten_result(message: Any, *before: Any, max_tokens: int = 800, exclude: tuple[str, ...] = ()) -> Turn | None:
    body = turns([*before, message])
    return made(evict_results, body, result_rules(max_tokens, *exclude)).reduce(len(body) - 1, body[-1])


LINES = "\n".join(f"{n}: something was done" for n in range(800))


@given(st.integers(0, 6), st.integers(0, 2000), st.integers(30, 400), st.booleans())
def test_no_result_grows_and_none_is_larger_than_asked(flavour: int, size: int, limit: int, as_parts: bool) -> None:
    text = text_of_size(size, flavour, size)
    message = result("a", [{"type": "text", "text": text}] if as_parts else text)
    form = evict_results.shortened(turn(message), limit, FORMAT, MARKER)
    if form is not None:
        after = decode(form.raw)
        assert form.facts.tokens == message_tokens(after) < message_tokens(message)
        assert isinstance(after["content"], list) == as_parts
        head, _, tail = text_of(after).partition("\n[The compaction proxy left out ")
        assert text.startswith(head)
        rest = tail.partition("part of the result.]\n")[2].split("\n")
        while not text.endswith("\n".join(rest)):
            line = rest.pop(0)  # a line that tells of a failure, or the names of the middle
            parts = line.removeprefix("Names in it: ").split() if line.startswith("Names in it: ") else [line]
            assert all(part in text for part in parts)
        marker = message_tokens(result("a", MARKER)) + 4
        assert form.facts.tokens <= max(limit, marker)
    elif message_tokens(message) > max(limit, 60):
        pytest.fail("nothing was done")


def test_a_program_that_was_read_keeps_more_names_and_no_lines_about_errors() -> None:
    lines = [f"def handle_{n}(request):\n    raise ValueError('failed {n}')\n" for n in range(400)]
    kept = {}
    for tool in ("Read", "bash"):
        body = turns([assistant(None, call("a", tool)), result("a", "\n".join(lines))])
        form = made(evict_results, body, result_rules(800)).reduce(1, body[1])
        assert form is not None
        middle = text_of(decode(form.raw)).partition("part of the result.]\n")[2]
        kept[tool] = len(middle.partition("Names in it: ")[2].split("\n")[0].split())
        assert ("ValueError" in middle.partition("Names in it: ")[0]) == (tool == "bash")
    assert kept["Read"] > 1.3 * kept["bash"] > 10


def test_a_form_is_made_once_and_kept_with_the_message() -> None:
    body = turns([result("a", LINES), assistant(None, call("b", "write_file", text=LONG))])
    counting = Counting()
    policy = result_rules(200)
    for _ in range(3):
        first = made(evict_results, body, policy, counting).reduce(0, body[0])
        second = made(truncate_args, body, policy, counting).reduce(1, body[1])
    calls = counting.counts
    assert made(evict_results, body, policy, counting).reduce(0, body[0]) is first
    assert made(truncate_args, body, policy, counting).reduce(1, body[1]) is second
    assert counting.counts == calls
    assert made(evict_results, body, result_rules(100), counting).reduce(0, body[0]) != first


def test_old_media_become_a_label_and_text_stays() -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "UklGRg" * 200, "format": "wav"}}
    marked = {**IMAGE, "cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "Look at this."}
    (before,) = turns([{"role": "user", "name": "ann", "content": [marked, text, audio]}])
    stage = made(media, [before], rules())
    assert stage.spares_newest_user
    form = stage.reduce(0, before)
    assert form is not None
    after = decode(form.raw)
    assert (after["role"], after["name"], after["content"][1]) == ("user", "ann", text)
    assert "image." in after["content"][0]["text"]
    assert after["content"][0]["cache_control"] == {"type": "ephemeral"}
    assert "audio." in after["content"][2]["text"]
    assert not form.facts.media
    assert stage.reduce(0, form) is None


LEFT_OUT = re.compile(r"\[The compaction proxy left out [^\]]*?\d|\.\.\.\(argument truncated\)")
TEXTS = st.sampled_from(
    ["line {n} of a log\n", "{n}% done\r", "a,{n},b\r", "word{n} ", "QUJD", "same\n", '{{"k": {n}}},\n']
)


@given(TEXTS, st.integers(1, 3_000), st.sampled_from(["", "\n", "\r\n", " end"]), st.booleans())
def test_a_reader_can_tell_that_and_how_much_was_left_out(line: str, count: int, end: str, in_call: bool) -> None:
    text = "".join(line.format(n=number) for number in range(count)) + end
    if in_call:
        form = cut_arguments(assistant(None, call("a", "write_file", content=text)))
        after = text if form is None else arguments_in(form)["content"]
    else:
        form = shorten_result(result("a", text), assistant(None, call("a", "read")))
        after = text if form is None else text_of(decode(form.raw))
    gone = len(text) - len(after)
    undone = re.sub(r"\s", "", text) == re.sub(r"\s", "", after)
    assert gone <= 0 or undone or LEFT_OUT.search(after)


TEXT = "line of a file\n" * 40


def found(*exchanges: tuple[str, dict[str, Any], str]) -> dict[int, Superseded]:
    """Return the superseded reads of calls with their results. The result of call ``n`` is message ``2n + 1``."""
    messages = []
    for number, (tool, arguments, text) in enumerate(exchanges):
        messages += [assistant(None, call(f"c{number}", tool, **arguments)), result(f"c{number}", text)]
    return superseded_reads(turns(messages), FORMAT)


def read(path: str = "a.py", text: str = TEXT, tool: str = "read_file", **arguments: Any) -> tuple[str, Any, str]:
    return tool, {"path": path, **arguments}, text


def write(path: str = "a.py", text: str = "ok", tool: str = "edit_file") -> tuple[str, Any, str]:
    return tool, {"path": path, "content": "x"}, text


def test_a_read_counts_until_the_file_is_read_again_or_written() -> None:
    assert found(read(), read("b.py"), read(), write("./a.py"), write()) == {
        1: Superseded(5, "read", "a.py"),
        5: Superseded(7, "written", "a.py"),
    }


@pytest.mark.parametrize(
    "text",
    [
        "Error: old_string not found",
        "The tool use was rejected",
        "",
        "No match in a.py",
        "Could not find the exact text",
    ],
)
def test_a_change_that_failed_outdates_nothing(text: str) -> None:
    assert found(read(), write(text=text)) == {}


def test_a_name_that_resembles_an_error_is_no_failure() -> None:
    assert 1 in found(read("errors.py"), write("errors.py", "The file errors.py has been updated."))


def test_a_call_without_a_result_outdates_nothing() -> None:
    body = turns(
        [assistant(None, call("a", "read", path="x")), result("a", TEXT), assistant(None, call("b", "edit", path="x"))]
    )
    assert superseded_reads(body, FORMAT) == {}


@pytest.mark.parametrize(
    ("earlier", "later", "covered"),
    [
        ({}, {}, True),
        ({"offset": 10, "limit": 5}, {"offset": 10, "limit": 5}, True),
        ({"offset": 10, "limit": 5}, {"offset": 1, "limit": 14}, True),
        ({"offset": 10, "limit": 5}, {"offset": 1, "limit": 13}, False),
        ({"offset": 10, "limit": 5}, {}, True),
        ({"offset": 5000, "limit": 5}, {}, False),
        ({"offset": 10}, {"offset": 10}, True),
        ({"offset": 10}, {}, False),
        ({"limit": 50}, {"limit": 60}, True),
        ({"limit": 60}, {"limit": 50}, False),
        ({"start_line": 3, "end_line": 9}, {"start_line": 1, "end_line": 9}, True),
        ({"startLine": 3, "endLine": 9}, {"startLine": 3, "endLine": 9}, True),
        ({"view_range": [3, 9]}, {"view_range": [1, 20]}, True),
        ({"view_range": [3, 9]}, {"view_range": [4, 20]}, False),
        ({"view_range": [3, -1]}, {"view_range": [3, -1]}, True),
        ({"offset": "10", "limit": 5}, {"offset": "10", "limit": 5}, False),
        ({"pages": "1-2"}, {"pages": "3-4"}, False),
        ({"pages": "1-2"}, {"pages": "1-2"}, True),
    ],
)
def test_lines_are_compared(earlier: dict[str, Any], later: dict[str, Any], covered: bool) -> None:
    assert (1 in found(read(**earlier), read(**later))) is covered


def test_other_tools_and_unknown_shapes_are_left() -> None:
    assert found(read(tool="search"), read(tool="search")) == {}
    assert found(read(), read(tool="view_file")) == {}
    several = ("read_many_files", {"paths": ["a.py", "b.py"]}, TEXT)
    assert found(several, several, write()) == {}
    assert found(("bash", {"command": "cat a.py"}, TEXT), write()) == {}


def test_a_patch_and_a_view_are_recognized() -> None:
    patch = {"input": "*** Begin Patch\n*** Update File: a.py\n@@\n-x\n+y\n*** End Patch"}
    assert 1 in found(read(), ("apply_patch", patch, "Done!"))
    view = ("str_replace_based_edit_tool", {"command": "view", "path": "a.py"}, TEXT)
    change = ("str_replace_based_edit_tool", {"command": "str_replace", "path": "a.py", "old_str": "x"}, "Edited.")
    assert found(view, view, change) == {1: Superseded(3, "read", "a.py"), 3: Superseded(5, "written", "a.py")}
    assert found(view, ("mcp__files__write_file", {"path": "a.py", "content": "x"}, "ok"))[1].event == "written"
