"""Check the measure of needed names on generated histories."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.quality import langchain
from bench.quality.conversations import tool_loop
from bench.quality.need import codex
from bench.quality.need.__main__ import main
from bench.quality.need.case import Case, Found, details, scored, summed
from bench.quality.need.sources import codex_sessions, support
from bench.quality.text import NEWEST, OURS
from proxy.compaction.summary_message import INDEX_TITLE
from tests.kit.upstream import faults


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


def prepared(folder: Path) -> Path:
    """Write two cases in the form of the prepared file."""
    made = [tool_loop(seed, 12_000) for seed in (1, 2)]
    rows = [
        {"id": one.name, "messages": one.messages, "paths": ["src/a.py", "src/gone.py"], "idents": list(one.facts)[:20]}
        for one in made
    ]
    (folder / "need-cli.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    return folder


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_names_are_counted_in_the_prompt_and_in_the_rest() -> None:
    history = said("early_name and other_name", "middle_name", "late_name")
    score = scored(Case("one", history, ["src/x.go"], ["early_name", "late_name"]), said("early_name"))
    # The control is as short as the prompt, so it has the newest name only.
    assert score.found == {"idents": Found(2, 1, 1, 1), "paths": Found(1, 0, 1, 0)}


def test_names_are_counted_with_their_file_and_ordinary_words_of_the_index() -> None:
    function = {"name": "bash", "arguments": '{"command": "grep -rn Name src"}'}
    called = {"role": "assistant", "content": "Now we stop.", "tool_calls": [{"id": "a", "function": function}]}
    found = "src/a.go:1: oneName\nsrc/b.go:2: twoName\n"
    history = [*said("the start"), called, {"role": "tool", "tool_call_id": "a", "content": found}, *said("end " * 99)]
    case = Case("one", history, ["src/a.go"], ["oneName", "twoName"])
    index = f"## {INDEX_TITLE}\n- src/ (read): a.go: oneName Stop; b.go\n- names: twoName"
    score = scored(case, said(index))
    assert (score.found["idents"], score.ordinary) == (Found(2, 2, 2, 2, 1), (1, 6))
    assert details([score, score]) == (1 / 2, 1 / 6)
    assert details([scored(case, history[1:3]), scored(case, said("oneName twoName"))])[1] is None


def test_shares_are_sums_over_the_names() -> None:
    texts = {"few": ["some_name"], "many": ["some_name", "aa_names", "bb_names", "cc_names"]}
    cases = [Case(id_, said(" ".join(names), "the end"), [], names) for id_, names in texts.items()]
    scores = [scored(case, said("some_name")) for case in cases]
    assert summed(scores, "idents")[0] == 2 / 5
    assert summed(scores, "paths") == (None, None)


def recording(calls: int) -> str:
    """Return the lines of a Codex session. Its first half names a file that the second half uses."""

    def item(**payload: Any) -> dict[str, Any]:
        return {"type": "response_item", "payload": payload}

    def message(role: str, text: str) -> dict[str, Any]:
        return item(type="message", role=role, content=[{"type": "input_text", "text": text}])

    entries: list[dict[str, Any]] = [
        {"type": "session_meta", "payload": {"id": "session-1"}},
        message("developer", "Obey house_rules."),
        message("user", "Repair src/lost_file.py, which defines repairMachine."),
        item(type="reasoning", summary=[]),
    ]
    for number in range(calls):
        command = (
            "cat src/lost_file.py house_rules repairMachine unseen_thing" if number == calls - 1 else f"step {number}"
        )
        entries += [
            item(type="function_call", name="shell", call_id=f"f{number}", arguments=json.dumps({"cmd": command})),
            item(type="custom_tool_call", name="patch", call_id=f"c{number}", input="*** patch"),
            message("user", "wait"),
            item(type="function_call_output", call_id=f"f{number}", output="word " * 1500),
            {"type": "event_msg", "payload": {"type": "token_count"}},
        ]
    return "\n".join(map(json.dumps, entries))


def test_a_codex_session_becomes_valid_messages_and_is_cut_at_half_of_its_calls() -> None:
    id_, messages = codex.session(recording(40).splitlines())
    assert id_ == "session-1"
    assert faults({"messages": messages}) == []
    assert [message["role"] for message in messages[:6]] == ["developer", "user", "assistant", "tool", "tool", "user"]
    case = codex.case(id_, messages)
    assert case is not None
    assert faults({"messages": case.messages}) == []
    assert sum(len(message.get("tool_calls", ())) for message in case.messages) == 40
    assert 0.25 < case.scale < 0.4
    # Names in the instructions or in no earlier message don't count.
    assert (case.paths, case.idents) == (["lost_file.py"], ["lost_file", "repairMachine"])
    assert codex.case(id_, codex.session(recording(4).splitlines())[1]) is None
    assert codex.session(['{"type": "session.start"}']) == ("", [])


def test_of_two_recordings_of_a_session_the_longer_one_counts(tmp_path: Path) -> None:
    for name, calls in (("a/0", 30), ("b/0", 40)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "full.jsonl").write_text(recording(calls))
    assert codex_sessions(tmp_path, [tmp_path]) == [codex.case(*codex.session(recording(40).splitlines()))]


def test_a_support_conversation_is_cut_after_the_results_of_its_calls(tmp_path: Path) -> None:
    def call(number: int, **arguments: Any) -> dict[str, Any]:
        function = {"name": "act", "arguments": json.dumps(arguments)}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"{number}", "type": "function", "function": function}],
        }

    result = {"role": "tool", "tool_call_id": "0", "content": "Passengers: Ann. " + "word " * 5000}
    traj = [
        {"role": "system", "content": "Pay with visa."},
        *said("I am user_12, order W77, 250 dollars."),
        call(0),
        result,
    ]
    traj += [call(1, user="user_12", amounts=[250, 99], order={"id": "W77"}, kind="visa"), *said("bye")]
    (tmp_path / "historical_trajectories").mkdir()
    (tmp_path / "historical_trajectories" / "x.json").write_text(
        json.dumps([{"traj": traj}, {"traj": traj[:2] + traj[4:]}])
    )
    (case,) = support(tmp_path, [tmp_path])
    assert case.messages == traj[:4]
    assert (case.paths, case.idents) == ([], ["250", "W77", "user_12"])


def test_it_prints_ours_beside_the_newest_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(langchain, "PYTHON", tmp_path / "none")
    output = run("--data", prepared(tmp_path), "--window", 8192)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines()[2:]]
    assert [row[:4] for row in rows] == [["coding", "2", "8,192", method] for method in (OURS, NEWEST)], output
    assert [row[5] for row in rows] == ["0", "0"], output
    ours, control = (int(row[8].removesuffix(" %")) for row in rows)
    assert control < ours <= 100, output


def test_without_data_it_says_so(tmp_path: Path) -> None:
    assert run("--data", tmp_path) == (
        "No recorded cases, so there is nothing to measure. Fix: --data FOLDER or --repository PATH.\n"
    )
