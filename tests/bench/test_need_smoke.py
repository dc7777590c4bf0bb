"""Check the measure of needed names on generated histories."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.quality.__main__ import PYTHON
from bench.quality.conversations import tool_loop
from bench.quality.need import codex
from bench.quality.need.__main__ import main
from bench.quality.need.score import Found, Score, Scorer, agreement, averaged, summed
from bench.quality.need.sources import CHECKPOINTS, codex_sessions, half, support
from bench.quality.need.text import Case
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


def test_names_are_counted_in_the_prompt_in_the_control_and_in_the_rest() -> None:
    case = Case(
        "one", said("early_name and other_name", "middle_name", "late_name"), ["src/x.go"], ["early_name", "late_name"]
    )
    score = Scorer().score(case, said("early_name"))
    # The control is as short as the prompt, so it has the newest name only.
    assert vars(score.found["idents"]) == {"names": 2, "prompt": 1, "control": 1, "rest": 1, "of_rest": 1}
    assert vars(score.found["paths"]) == {"names": 1, "prompt": 0, "control": 0, "rest": 1, "of_rest": 0}
    assert score.lost == {"paths": ["x.go"], "idents": []}


def test_the_control_keeps_the_instructions_and_has_the_size_of_the_prompt() -> None:
    instructions = {"role": "system", "content": "first_rule"}
    history = [instructions, *said("old_name " * 50, "new_name " * 50)]
    case = Case("one", history, [], ["first_rule", "old_name", "new_name"])
    small = Scorer().score_newest(case, 20)
    large = Scorer().score_newest(case, 10_000)
    assert (small.found["idents"].control, large.found["idents"].control) == (2, 3)
    assert small.lost["idents"] == ["old_name"]


def test_sums_weigh_names_and_means_weigh_cases() -> None:
    texts = {"few": ["some_name"], "many": ["some_name", "aa_names", "bb_names", "cc_names"]}
    cases = [Case(id_, said(" ".join(names), "the end"), [], names) for id_, names in texts.items()]
    scores = [Scorer().score(case, said("some_name")) for case in cases]
    assert summed(scores, "idents")["prompt"] == 2 / 5
    assert averaged(scores, "idents")["prompt"] == (1 + 1 / 4) / 2
    assert summed(scores, "paths") == averaged(scores, "paths") == {"prompt": None, "control": None, "rest": None}


def test_agreement_compares_the_ranks_of_the_counted_and_the_measured_shares() -> None:
    def scored(kept: int, prompt: int) -> Score:
        found = {"idents": Found(10, prompt, 0, 0, 0), "paths": Found(10, 10, 0, 0, 0)}
        return Score(
            "one", 1, found, counted={"files": (kept, 9, 0), "numbers": (1, 0, 0), "identifiers": (kept, 9, 0)}
        )

    rising = [scored(1, 2), scored(2, 3), scored(3, 9)]
    assert agreement(rising, "idents") == pytest.approx(1)
    assert agreement([*rising, scored(4, 1)], "idents") == pytest.approx(-0.2)
    # All prompts have all files, so there is nothing to rank.
    assert agreement(rising, "paths") is None
    assert agreement(rising[:1], "idents") is None


def test_names_in_escaped_json_alone_can_be_ignored() -> None:
    arguments = json.dumps({"code": "x\nreadName"})
    call = {"id": "1", "type": "function", "function": {"name": "write", "arguments": arguments}}
    history = [{"role": "assistant", "content": None, "tool_calls": [call]}, *said("the end")]
    case = Case("one", history, [], ["readName", "nreadName"])
    assert Scorer().score(case, history).found["idents"].names == 2
    assert Scorer(readable=True).score(case, history).found["idents"].names == 1


def test_halves_are_disjoint_and_complete() -> None:
    cases = [Case(str(number), [], [], []) for number in range(50)]
    a, b = half(cases, "a"), half(cases, "b")
    assert len(a) + len(b) == len(half(cases, None)) == 50
    assert 10 < len(a) < 40
    assert not {case.id for case in a} & {case.id for case in b}


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


def test_sessions_are_read_from_a_bare_repository_and_from_a_folder(tmp_path: Path) -> None:
    work, bare = tmp_path / "work", tmp_path / "bare"
    for name, calls in (("a/0", 30), ("b/0", 40)):
        (work / name).mkdir(parents=True)
        (work / name / "full.jsonl").write_text(recording(calls))
    (plain,) = codex_sessions(tmp_path, [work])
    author = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    for command in (("init", "-q", "-b", CHECKPOINTS), ("add", "."), (*author, "commit", "-qm", "x")):
        subprocess.run(["git", "-C", str(work), *command], check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(bare)], check=True)
    assert codex_sessions(tmp_path, [bare]) == [plain]
    # Of two recordings of a session, the longer one counts.
    assert plain == codex.case(*codex.session(recording(40).splitlines()))


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


def test_it_prints_ours_beside_the_newest_messages(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    folder = prepared(tmp_path)
    output = run("--data", folder, "--window", 8192, "--method", "ours", "--json", file)
    assert "sums over all cases" in output
    (row,) = json.loads(file.read_bytes())
    assert (row["source"], row["window"], row["too_long"], len(row["cases"])) == ("coding", 8192, 0, 2)
    assert row["tokens"] < 8192
    assert row["idents"]["sum"]["control"] < row["idents"]["sum"]["prompt"] <= 1
    assert "rank correlation (Spearman)" in output
    assert all(sum(sum(counts) for counts in case["counted"].values()) > 20 for case in row["cases"])
    assert "agreement" in row["paths"]
    lines = run("--data", folder, "--window", 8192, "--method", "newest", "--markdown").splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("| coding | 2 | 8,192 | newest messages only |")


@pytest.mark.full
@pytest.mark.skipif(not PYTHON.exists(), reason="the environment with LangChain is not made")
def test_it_measures_langchain_too(tmp_path: Path) -> None:
    output = run("--data", prepared(tmp_path), "--window", 8192, "--method", "langchain", "--markdown")
    assert [line.split(" | ")[3] for line in output.splitlines()[2:]] == ["LangChain", "LangChain, tuned"]


def test_without_data_it_says_so(tmp_path: Path) -> None:
    assert run("--data", tmp_path) == (
        "No recorded cases, so there is nothing to measure. Fix: --data FOLDER or --repository PATH.\n"
    )
