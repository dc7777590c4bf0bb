"""Structural repair: the form of a damaged history after compaction."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.scripted import words
from tests.kit.structure import LAST, SYSTEM, arrived, assistant, calls, history, result, sound, user
from tests.kit.upstream import faults

LOST = "No result of this call was recorded."


def sound_now(messages: Sequence[Any]) -> bool:
    return faults({"messages": list(messages)}) == []


def result_texts(messages: Sequence[Any]) -> list[str]:
    return [m["content"] for m in messages if m["role"] == "tool"]


def test_80_a_result_without_a_call_becomes_text_or_goes(tmp_path: Path) -> None:
    before = history(
        [result("nobody-1", "STRAY-OLD"), result("nobody-2", "")],
        [user("Wait."), result("nobody-3", "STRAY-NEW"), result("nobody-4", "")],
    )
    assert not sound_now(before)
    after = arrived(tmp_path, before)
    assert sound_now(after.messages)
    note, last = after.body[-2:]
    assert last == LAST
    assert (note["role"], note["content"].splitlines()[-1]) == ("assistant", "STRAY-NEW")
    assert after.body[-3] == user("Wait.")
    assert "STRAY-OLD" in after.transcript


def test_80_a_group_with_a_known_and_an_unknown_id_keeps_the_known_one(tmp_path: Path) -> None:
    group = [calls("a"), result("nobody", "STRAY"), result("a", "KNOWN")]
    after = arrived(tmp_path, history(group, group))
    assert sound_now(after.messages)
    assert after.body[-4:-2] == [calls("a"), result("a", "KNOWN")]
    assert "STRAY" in after.body[-2]["content"]


def test_81_a_call_without_a_result_gets_one_that_says_so(tmp_path: Path) -> None:
    before = history([calls("old-1", "old-2"), result("old-2", "HALF-OLD")], [calls("new-1", "new-2")])
    assert not sound_now(before)
    after = arrived(tmp_path, before)
    assert sound_now(after.messages)
    assert after.body[-4:] == [calls("new-1", "new-2"), result("new-1", LOST), result("new-2", LOST), LAST]
    assert "HALF-OLD" in after.transcript
    assert LOST in after.transcript


def test_81_calls_that_the_client_may_still_answer_stay_as_they_are(tmp_path: Path) -> None:
    trailing = [LAST, calls("open-1", "open-2")]
    after = arrived(tmp_path, history([calls("old")], [calls("new")], trailing), status=400)
    assert after.body[-2:] == trailing
    (fault,) = faults({"messages": after.messages})
    assert "open-1, open-2" in fault.message


@pytest.mark.parametrize("answered", ["open-1", "open-2", "open-3"])
def test_81_calls_at_the_end_of_which_some_are_answered_are_all_answered(answered: str, tmp_path: Path) -> None:
    trailing = [LAST, calls("open-1", "open-2", "open-3"), result(answered, "DONE")]
    after = arrived(tmp_path, history([calls("old")], [], trailing))
    assert sound_now(after.messages)
    assert after.body[-5:-2] == trailing
    others = [id_ for id_ in ("open-1", "open-2", "open-3") if id_ != answered]
    assert after.body[-2:] == [result(id_, LOST) for id_ in others]


def test_82_results_are_moved_behind_their_calls(tmp_path: Path) -> None:
    def apart(name: str) -> list[Any]:
        return [
            calls(f"{name}-1", f"{name}-2"),
            result(f"{name}-2", f"SECOND-{name}"),
            user(f"WAIT-{name}"),
            assistant("I wait."),
            result(f"{name}-1", f"FIRST-{name}"),
        ]

    before = history(apart("old"), apart("new"))
    assert not sound_now(before)
    after = arrived(tmp_path, before)
    assert sound_now(after.messages)
    asked, second, wait, waiting, first = apart("new")
    assert after.body[-6:] == [asked, second, first, wait, waiting, LAST]
    assert after.transcript.index("FIRST-old") < after.transcript.index("WAIT-old")


def test_82_an_id_that_comes_again_is_matched_to_the_call_before(tmp_path: Path) -> None:
    again = [m for n in range(3) for m in (calls("call_0"), user(f"Wait {n}."), result("call_0", f"TURN-{n}"))]
    after = arrived(tmp_path, history(again, again))
    assert sound_now(after.messages)
    assert result_texts(after.body)[-3:] == ["TURN-0", "TURN-1", "TURN-2"]


@pytest.mark.parametrize("bad", ["", None, 7, "twice"])
def test_83_empty_and_repeated_ids_are_replaced_on_both_sides(bad: Any, tmp_path: Path) -> None:
    group = [calls(bad, bad, "good"), result(bad, "ONE"), result(bad, "TWO"), result("good", "THREE")]
    before = history(group, group)
    assert not sound_now(before)
    after = arrived(tmp_path / "first", before)
    assert sound_now(after.messages)
    asked, *results = after.body[-5:-1]
    ids = [made["id"] for made in asked["tool_calls"]]
    assert len(set(ids)) == 3
    assert all(ids)
    assert ids[2] == "good"
    assert results == [result(id_, text) for id_, text in zip(ids, ["ONE", "TWO", "THREE"], strict=True)]
    assert arrived(tmp_path / "second", before).messages == after.messages, "nothing but the content decides"


def test_84_an_assistants_message_with_nothing_in_it_goes(tmp_path: Path) -> None:
    nothing = [assistant(None), assistant(""), {"role": "assistant"}, {"role": "assistant", "content": []}]
    before = history(nothing, [user("Wait."), *nothing, user("Still there?"), assistant("Yes.")])
    assert not sound_now(before)
    after = arrived(tmp_path, before)
    assert sound_now(after.messages)
    assert after.body[-4:] == [user("Wait."), user("Still there?"), assistant("Yes."), LAST]


def legacy(name: str, text: str | None) -> list[Any]:
    asked = assistant(None, function_call={"name": name, "arguments": "{}"})
    return [asked, *([] if text is None else [{"role": "function", "name": name, "content": text}])]


def paired(messages: Sequence[Any]) -> bool:
    """Whether each old-style call has its result right behind it, and no result lacks its call."""
    pairs = itertools.pairwise([*messages, {"role": "end"}])
    asked = [(m["function_call"]["name"], after.get("name")) for m, after in pairs if m.get("function_call")]
    results = sum(m["role"] == "function" for m in messages)
    return all(call == answer for call, answer in asked) and len(asked) == results


def test_85_a_function_call_and_its_result_are_a_pair(tmp_path: Path) -> None:
    old = [
        *legacy("find", None),
        *legacy("read", "READ-OLD"),
        {"role": "function", "name": "none", "content": "STRAY-OLD"},
    ]
    asked, late = legacy("find", "FOUND-NEW")
    new = [
        asked,
        user("Wait."),
        late,
        *legacy("read", None),
        {"role": "function", "name": "none", "content": "STRAY-NEW"},
    ]
    after = arrived(tmp_path, history(old, new))
    assert sound_now(after.messages)
    assert paired(after.messages)
    assert after.body[-7:-2] == [asked, late, user("Wait."), *legacy("read", LOST)]
    assert (after.body[-2]["role"], after.body[-1]) == ("assistant", LAST)
    assert "STRAY-NEW" in after.body[-2]["content"]
    assert "READ-OLD" in after.transcript
    assert "STRAY-OLD" in after.transcript


def test_85_a_cut_never_parts_a_pair(tmp_path: Path) -> None:
    steps = [message for n in range(40) for message in legacy("step", f"STEP-{n} " + words(400, f"s{n}x"))]
    after = arrived(tmp_path, [SYSTEM, user("Go."), *steps])
    assert paired(after.messages)
    assert sound_now(after.messages)
    assert after.body[-2:] == steps[-2:]


def loop(count: int) -> list[Any]:
    """Exchanges of about 600 tokens each in which the user says nothing; every third call has no result."""
    messages: list[Any] = []
    for number in range(count):
        messages.append(
            assistant(f"Step {number}: {words(400, f's{number}x')}", tool_calls=calls(f"c{number}")["tool_calls"])
        )
        if number % 3:
            messages.append(result(f"c{number}", words(200, f"r{number}x")))
    return messages


def test_86_a_user_message_remains(tmp_path: Path) -> None:
    before = [SYSTEM, user("THE-ONLY-ORDER: repair the build."), *loop(31), result("c30", "LAST-RESULT")]
    assert not sound_now(before)
    after = arrived(tmp_path, before)
    assert sound_now(after.messages)
    assert after.roles()[:2] == ["system", "user"]
    assert "THE-ONLY-ORDER" in after.messages[1]["content"]
    assert after.body[-1] == before[-1]


STRICT = {"strict_alternation": True}


def in_turn(messages: Sequence[Any]) -> bool:
    """The check of Mistral's chat template: user and assistant in turn, calls and results not counted."""
    counted = [m["role"] for m in messages[1:] if m["role"] != "tool" and not m.get("tool_calls")]
    return messages[0]["role"] == "system" and all(
        role == ("assistant" if place % 2 else "user") for place, role in enumerate(counted)
    )


def test_86_the_user_speaks_first_where_the_upstream_wants_it(tmp_path: Path) -> None:
    """Nothing is summarised here: an old result is shortened, and the assistant's greeting stays first."""
    read = [calls("a"), result("a", words(12_000, "huge"))]
    before = [SYSTEM, assistant("WELCOME."), user("Read it."), *read, *sound(0, 2), LAST]
    after = arrived(tmp_path, before, profile=STRICT)
    assert "<conversation_summary>" not in after.messages[1]["content"]
    assert sound_now(after.messages)
    assert in_turn(after.messages)
    assert after.messages[2] == assistant("WELCOME.")
    assert after.messages[-1] == LAST


DISORDER = [
    user("FIRST words."),
    user("SECOND words.", name="Ann"),
    assistant("One."),
    assistant("Two."),
    calls("x"),
    result("x", "seen"),
    user("THIRD words."),
    {"role": "system", "content": "MIND the gap."},
    calls("y"),
    result("y", "seen too"),
]


def test_87_strict_upstreams_hear_user_and_assistant_in_turn(tmp_path: Path) -> None:
    before = history(DISORDER, DISORDER)
    assert not in_turn(before)
    after = arrived(tmp_path, before, profile=STRICT)
    assert sound_now(after.messages)
    assert in_turn(after.messages)
    roles = after.roles()
    assert "system" not in roles[1:]
    assert ("tool", "user") not in itertools.pairwise(roles)
    assert ("user", "user") not in itertools.pairwise(roles)
    said = "\n".join(m["content"] or "" for m in after.messages)
    kept = said[said.rindex("FIRST") :]
    places = [kept.index(text) for text in ("FIRST", "SECOND", "One.", "Two.", "seen", "THIRD", "MIND", "And now?")]
    assert places == sorted(places), "nothing that was kept is lost, nor has it moved"
    assert said.count("MIND the gap.") == 2, "system messages of the summarised part stay too"
    assert [m["tool_call_id"] for m in after.messages if m["role"] == "tool"][-2:] == ["x", "y"]
    assert after.messages[-1] == LAST


def test_87_the_summary_and_the_user_behind_it_are_one_message_there(tmp_path: Path) -> None:
    before = [SYSTEM, *(user(f"Part {n}: {words(900, f'p{n}x')}") for n in range(17)), LAST]
    after = arrived(tmp_path, before, profile=STRICT)
    assert after.roles() == ["system", "user"]
    note = after.messages[1]["content"]
    assert note.startswith("<conversation_summary>")
    assert note.endswith(before[-2]["content"] + "\n\nAnd now?")


def test_87_other_upstreams_get_messages_as_they_are(tmp_path: Path) -> None:
    after = arrived(tmp_path, history(DISORDER, DISORDER))
    assert sound_now(after.messages)
    assert after.body[-11:] == [*DISORDER, LAST]


def test_88_further_fields_of_kept_messages_survive(tmp_path: Path) -> None:
    annotated = [
        {"type": "url_citation", "url_citation": {"url": "https://x.example", "start_index": 0, "end_index": 2}}
    ]
    plain = [
        user("I am Ann.", name="Ann"),
        assistant(None, refusal="I can't do that."),
        user("Say it aloud."),
        assistant(None, audio={"id": "audio_1"}),
        user("Look it up."),
        assistant("Found.", annotations=annotated, x_further={"a": 1.0}),
    ]
    damaged = [
        calls("d", "d", name="Bob", annotations=annotated, reasoning_content="hm"),
        result("d", "ONE") | {"name": "look", "x_further": [1]},
        result("d", "TWO"),
    ]
    before = history([*plain, *damaged], [*plain, *damaged])
    assert not sound_now(before)
    after = arrived(tmp_path, before)
    assert sound_now(after.messages)
    *kept, asked, one, two, last = after.body[-10:]
    assert kept == plain
    assert asked | {"tool_calls": None} == damaged[0] | {"tool_calls": None}
    assert one == damaged[1]
    assert (two["content"], last) == ("TWO", LAST)
