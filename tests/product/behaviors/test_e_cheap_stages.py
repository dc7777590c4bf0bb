"""The stages that call no model: copies, old media, old results, and old arguments."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.front_door import (
    ARCHIVE_ID,
    Front,
    alone,
    archive_id,
    calling,
    front,
    lines,
    look,
    numbers_before,
    picture,
    png,
    result,
    says,
    system,
    text_of,
    tokens,
    user,
    words,
)

LAST = {"messages": 1}
MARKER = re.compile(r"\[[^\[\]]*compaction proxy[^\[\]]*\]", re.IGNORECASE)

EAGER: dict[str, dict[str, Any]] = {
    "duplicates": {"min_length": 1},
    "truncate_args": {"max_length": 1, "tools": ["*"]},
    "evict_results": {"max_tokens": 1, "exclude": []},
    "media": {},
}
"""Each stage as eager as its settings allow."""

POLICIES: dict[str, dict[str, Any]] = {
    "duplicates": alone("duplicates", 2_000, keep=LAST),
    "media": alone("media", 1_500, keep=LAST),
    "results": alone("evict_results", 2_000, keep={"messages": 2}, max_tokens=1_600),
    "per-tool": alone(
        "evict_results", 2_000, keep=LAST, max_tokens=2_000, max_tokens_per_tool={"shell": 300}, exclude=["catalogue"]
    ),
    "arguments": alone("truncate_args", 2_000, keep=LAST, max_length=300, tools=["*"]),
    "own-text": alone(
        "truncate_args", 2_000, keep=LAST, max_length=300, tools=["*"], truncation_text="<{characters} gone, see {id}>"
    ),
    "batches": alone("evict_results", 4_000, keep={"messages": 4}, max_tokens=200),
    **{f"eager-{section}": alone(section, 1_000, keep=LAST, **settings) for section, settings in EAGER.items()},
    "preview": alone("evict_results", 1_000, keep=LAST, max_tokens=800),
    "embedded": alone("evict_results", 2_000, keep=LAST, max_tokens=1_000),
}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    # A window so wide that no share of it and no last resort plays a part.
    with front(POLICIES, tmp_path_factory.mktemp("cheap"), window=64_000) as running:
        yield running


def arguments(message: Any, index: int = 0) -> Any:
    return json.loads(message["tool_calls"][index]["function"]["arguments"])


def test_38_older_copies_become_a_reference(door: Front) -> None:
    same, short = lines(60, "row"), "ok: nothing to do"
    messages = [
        user("Look."),
        *look("c1", same),
        *look("c2", short),
        *look("c3", same),
        *look("c4", same + "."),
        *look("c5", short),
        *look("c6", same),
        says("I have seen it."),
        user("What now?"),
    ]
    seen = door.ask(messages, "duplicates")
    assert seen.steps == ["duplicates"]
    older = [2, 6]
    for index in older:
        reference = seen.messages[index]
        assert reference | {"content": ""} == messages[index] | {"content": ""}, "only the text is another"
        assert "\n" not in reference["content"].strip()
        assert len(reference["content"]) < 400
        assert re.search(r"\bsame\b|\bidentical\b|\bcopy\b", reference["content"])
        assert re.search(r"\blater\b|\bagain\b|\bbelow\b|\bnewe", reference["content"])
    kept = [message for index, message in enumerate(messages) if index not in older]
    assert [message for index, message in enumerate(seen.messages) if index not in older] == kept


def test_39_old_media_become_a_label(door: Front) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg" + "A" * 800_000, "format": "wav"}}
    paper = {
        "type": "file",
        "file": {"filename": "plan.pdf", "file_data": "data:application/pdf;base64," + "JVBE" * 1_000},
    }
    messages = [
        user([{"type": "text", "text": "What is in this picture?"}, picture()]),
        says("A cat."),
        user([sound, {"type": "text", "text": "And here?"}]),
        says("A dog."),
        user([{"type": "text", "text": "And this?"}, paper]),
        says("A plan."),
        user([{"type": "text", "text": "And in this one?"}, picture(png(512, 512)), sound]),
        *look("c1", "a bird"),
        *look("c2", "another bird"),
    ]
    seen = door.ask(messages, "media")
    assert seen.steps == ["media"]
    assert seen.messages[6:] == messages[6:], "the newest message keeps its own, however much came after it"
    assert [m for m in seen.messages if m["role"] == "assistant"] == [m for m in messages if m["role"] == "assistant"]
    for index, place, word in ((0, 1, "image"), (2, 0, "audio"), (4, 1, "file")):
        parts = seen.messages[index]["content"]
        assert parts[1 - place] == messages[index]["content"][1 - place], "what the user said stays"
        assert set(parts[place]) == {"type", "text"}
        assert parts[place]["type"] == "text"
        assert word in parts[place]["text"].lower()
        assert len(parts[place]["text"]) < 300
        assert "base64" not in parts[place]["text"]


def test_40_old_results_become_a_preview(door: Front) -> None:
    rows = lines(400, "row").splitlines()
    rows[200] = "ERROR: connection refused by db-7"
    rows[290] = "Traceback (most recent call last):"
    text = "\n".join(rows)
    messages = [user("Run it."), *look("c1", text), *look("c2", lines(20)), says("It failed."), user("Why?")]
    seen = door.ask(messages, "results")
    assert seen.steps == ["evict_results"]
    assert [*seen.messages[:2], *seen.messages[3:]] == [*messages[:2], *messages[3:]]
    preview = seen.messages[2]["content"]
    assert tokens(preview) < 600
    assert preview.startswith("\n".join(rows[:5]) + "\n")
    assert preview.endswith("\n" + "\n".join(rows[-5:]))
    assert rows[200] in preview, "a line that looks like an error stays"
    assert rows[290] in preview
    marker = "\n".join(MARKER.findall(preview))
    assert "not part of the result" in marker
    gone = [row for row in rows if row not in preview.splitlines()]
    assert abs(sum(numbers_before("lines", marker)) - len(gone)) <= 4
    size = sum(len(row) + 1 for row in gone)
    assert abs(sum(numbers_before("characters", marker)) - size) <= 200
    assert door.archived(archive_id(marker), "results") == [messages[2]]


def test_41_tools_have_limits_and_exceptions_of_their_own(door: Front) -> None:
    messages = [
        user("Go."),
        *look("c1", lines(100), "shell"),
        *look("c2", lines(100), "read_file"),
        *look("c3", lines(300), "catalogue"),
        *look("c4", lines(300), "read_file"),
        *look("c5", lines(15), "shell"),
        says("Done."),
        user("What now?"),
    ]
    seen = door.ask(messages, "per-tool")
    changed = [index for index, message in enumerate(messages) if seen.messages[index] != message]
    assert changed == [2, 8], "the shell's over 300 tokens, the reader's over 2,000"


def test_42_only_long_strings_in_arguments_are_cut(door: Front) -> None:
    long = words(600)
    given: dict[str, Any] = {
        "path": "src/" + "deep/" * 120 + "main.py",
        "command": "echo " + long,
        "url": "https://example.com/?q=" + "x" * 500,
        "id": "i" * 400,
        "content": long,
        "edits": [{"old": long, "new": "short", "line": 7}, {"old": "a", "new": long, "all": True}],
        "ratio": 0.5,
        "none": None,
        "list": ["short", long, 3],
    }
    messages = [
        user("Write it."),
        calling(("c1", "write_file", given), ("c2", "look", {"path": "a.py"})),
        result("c1", "written"),
        result("c2", "seen"),
        *look("c3", lines(30)),
        says("Done."),
        user("What now?"),
    ]
    seen = door.ask(messages, "arguments")
    assert seen.steps == ["truncate_args"]
    assert [seen.messages[0], *seen.messages[2:]] == [messages[0], *messages[2:]]
    call, other = seen.messages[1]["tool_calls"]
    assert other == messages[1]["tool_calls"][1]
    assert call["id"] == "c1"
    cut = arguments(seen.messages[1])
    assert list(cut) == list(given), "the same shape"
    for name in ("path", "command", "url", "id", "ratio", "none"):
        assert cut[name] == given[name], "what says what the call was about stays whole"
    assert cut["edits"][0] == {"old": cut["edits"][0]["old"], "new": "short", "line": 7}
    assert cut["edits"][1] == {"old": "a", "new": cut["edits"][1]["new"], "all": True}
    assert cut["list"] == ["short", cut["list"][1], 3]
    for value in (cut["content"], cut["edits"][0]["old"], cut["edits"][1]["new"], cut["list"][1]):
        assert len(value) < len(long) // 2
        assert value.startswith(long[:20])


def test_43_no_marker_can_be_taken_for_the_value(door: Front) -> None:
    long = words(1_500)
    messages = [
        user("Write it."),
        calling(("c1", "write_file", {"path": "a.py", "content": long})),
        result("c1", "written"),
        *look("c2", lines(60)),
        says("Done."),
        user("What now?"),
    ]
    seen = door.ask(messages, "arguments")
    value = arguments(seen.messages[1])["content"]
    marker = value.removeprefix(common_start(value, long))
    assert "compaction proxy" in marker.lower()
    assert re.search(r"(?:not|no) part of the value", marker)
    assert "..." not in marker
    assert not marker.rstrip("]").endswith("…")
    (left_out,) = numbers_before("characters", marker)
    assert left_out == len(long) - len(common_start(value, long))
    assert door.archived(archive_id(marker), "arguments") == [messages[1]]
    own = arguments(door.ask(messages, "own-text").messages[1])["content"]
    assert re.search(r"<\d[\d,]* gone, see [0-9a-f]{20}>$", own), "a policy's own words take the same figures"


def common_start(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def test_44_clearing_comes_in_batches_and_stays(door: Front) -> None:
    # The text outside the results is large enough to reach the trigger at every turn.
    messages: list[Any] = [system(words(3_600)), user("Read all the files.")]
    cleared: dict[int, Any] = {}
    batches = []
    turns = 24
    for turn in range(turns):
        messages += look(f"c{turn}", lines(45, f"file {turn} row"))
        seen = door.ask(messages, "batches")
        now = {i: sent for i, (sent, own) in enumerate(zip(seen.messages, messages, strict=True)) if sent != own}
        assert {index: now.get(index) for index in cleared} == cleared, "what was cleared stays as it is"
        results = [index for index, message in enumerate(messages) if message["role"] == "tool"]
        assert list(now) == results[: len(now)], "the oldest go first"
        new = set(now) - set(cleared)
        if new:
            counter = door.upstream.counter
            saved = sum(counter.message(messages[i]) - counter.message(now[i]) for i in new)
            batches.append(saved / (seen.conversations[-1].tokens + saved))
        cleared = now
    assert 2 <= len(batches) <= turns // 2
    assert min(batches) >= 0.09, "a batch takes off a tenth, counted a little differently here"


@pytest.mark.parametrize("section", ["duplicates", "evict_results"])
def test_45_tiny_results_stay(section: str, door: Front) -> None:
    tiny = ["ok", "", "true", "exit status 0", "42 files, 3 folders", "ok: nothing has been changed since"] * 4
    messages = [user("Go."), *look("c0", lines(200)), *look("c00", lines(200))]
    for number, text in enumerate(tiny, start=1):
        messages += look(f"c{number}", text)
    messages += [says("Done."), user("What now?")]
    seen = door.ask(messages, f"eager-{section}")
    assert seen.messages[2] != messages[2], "the stage was at work"
    assert seen.messages[5:] == messages[5:]


@pytest.mark.parametrize("section", EAGER)
def test_46_no_stage_makes_anything_longer(section: str, door: Front) -> None:
    messages: list[Any] = [user("Go."), *look("first", lines(100)), *look("second", lines(100))]
    plain = picture()
    pictures = [plain, picture(png(8, 8)), {**plain, "image_url": {**plain["image_url"], "detail": "low"}}]
    for number in range(1, 40):
        text = words(number * 12, f"n{number // 2}x")
        messages += [
            calling((f"c{number}", "write_file", {"path": "a", "content": text, "note": text[: number * 12]})),
            result(f"c{number}", text),
            user([{"type": "text", "text": "And?"}, pictures[number % 3]]) if number % 4 == 0 else says("Done."),
        ]
    messages.append(user("What now?"))
    seen = door.ask(messages, f"eager-{section}")
    assert seen.steps == [section]
    counter = door.upstream.counter
    for sent, own in zip(seen.messages, messages, strict=True):
        assert counter.message(sent) <= counter.message(own), f"{own} became {sent}"


def test_47_cuts_fall_between_lines_and_characters(door: Front) -> None:
    """Sent with every character beyond ASCII escaped, so that a cut in the bytes would tear a pair apart."""
    rows = [f'{number} 👩‍🚀🚀 "quoted" \\ back\tslash é' for number in range(300)]
    one_line = "🚀" * 6_000
    escaped = '\\"🚀\n' * 400
    messages = [
        user("Go."),
        *look("c1", "\n".join(rows)),
        *look("c2", one_line),
        calling(("c3", "write_file", {"path": "a", "content": escaped})),
        result("c3", "written"),
        says("Done."),
        user("What now?"),
    ]
    sent = door.ask(messages, "preview").messages
    json.dumps(sent, ensure_ascii=False).encode()  # no half of a pair is left over
    kept = [row for row in MARKER.sub("", sent[2]["content"]).splitlines() if row.strip()]
    assert 4 <= len(kept) < 300
    assert set(kept) <= set(rows), "whole lines"
    single = MARKER.sub("", sent[4]["content"]).replace("\n", "")
    assert 10 <= len(single) < 6_000
    assert set(single) == {"🚀"}
    sent = door.ask(messages, "eager-truncate_args").messages
    json.dumps(sent, ensure_ascii=False).encode()
    value = arguments(sent[5])["content"]
    assert value != escaped
    assert len(common_start(value, escaped)) >= 20


def test_48_embedded_data_goes_before_text(door: Front) -> None:
    """If leaving out unreadable data is enough, all lines of text stay."""
    before, after = lines(8, "before").splitlines(), lines(8, "after").splitlines()
    picture_url = png() + "QUJD" * 2_000
    blob = "".join(f"Zm9v{number:04d}YmFy" for number in range(900))
    text = "\n".join([*before, f'<img src="{picture_url}"/>', "between", blob, *after])
    messages = [user("Fetch it."), *look("c1", text), says("Done."), user("What now?")]
    seen = door.ask(messages, "embedded")
    assert seen.steps == ["evict_results"]
    sent = text_of(seen.messages[2])
    assert {*before, "between", *after} <= set(sent.splitlines()), "every line of text is still there"
    assert '<img src="' in sent
    assert "QUJDQUJDQUJD" not in sent
    assert "Zm9v0400YmFy" not in sent
    assert ARCHIVE_ID.search(sent), "the data can be had"
