"""Check the measure of stated rules on generated sessions."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.quality import constraints
from bench.quality.constraints import FORMS, OWN, READ, Session, cases, demands, main, stated
from bench.quality.conversations import tool_loop
from tests.kit.upstream import faults

NOWHERE = Path("no-python")


def prepared(folder: Path) -> Path:
    made = [tool_loop(seed, 12_000) for seed in (1, 2)]
    rows = [{"id": one.name, "messages": one.messages, "paths": [], "idents": []} for one in made]
    (folder / "need-cli.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    return folder


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_demands_are_read_from_a_repository(tmp_path: Path) -> None:
    file = tmp_path / constraints.MODULE
    file.parent.mkdir(parents=True)
    file.write_text('import x\nSSSCS = [{"id": 1, "sssc": "Be brief."}, {"id": 2, "sssc": "Be kind."}]\n')
    author = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    for command in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "x")):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    assert demands(tmp_path) == ["Be brief.", "Be kind."]
    assert len(set(json.loads(OWN.read_text()))) == 30


@pytest.mark.parametrize("form", FORMS)
def test_a_demand_is_in_the_middle_and_never_before_a_result(form: str) -> None:
    session = Session(tool_loop(1, 3_000).messages)
    inserted = stated(form, "Be brief.", ["one", "two"])
    assert inserted[-1]["content"].endswith("one\n- Be brief.\ntwo" if form == READ else "one\nBe brief.\ntwo")
    places = [session.place(depth) for depth in constraints.DEPTHS]
    assert places == sorted(places)
    for place in places:
        assert faults({"messages": [*session.messages[:place], *inserted, *session.messages[place:]]}) == []


def test_the_control_reaches_back_as_far_as_its_size() -> None:
    messages = [{"role": "system", "content": "x " * 50}, *({"role": "user", "content": "y " * 100} for _ in range(3))]
    session = Session(messages)
    system, one = session.sizes[:2]
    assert session.reaches(4, "Be brief.", "Be brief.", system + 10)
    assert not session.reaches(4, "Be brief.", "Be brief.", system)
    assert session.reaches(2, "Be brief.", "Be brief.", system + 2 * one + 10)
    assert not session.reaches(2, "Be brief.", "Be brief.", system + 2 * one)


def test_each_demand_has_its_turn() -> None:
    listed = list(cases(["a", "b", "c"], 3, 2))
    assert len(listed) == 3 * len(constraints.DEPTHS) * 2
    assert {text for _, _, text in listed} == {"a", "b", "c"}


def test_it_prints_ours_beside_the_newest_messages(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("--window", 8192, "--sessions", 1, "--langchain", NOWHERE, "--json", file)
    output = run("--data", prepared(tmp_path), *options)
    rows = json.loads(file.read_bytes())
    assert [row["form"] for row in rows] == list(FORMS)
    for row in rows:
        assert row["cases"] == 6 == row["ours"] + len(row["lost"])
        assert row["newest"] < row["ours"]
        assert row["tokens"] / 6 < 8192
    assert output.splitlines()[2].startswith("| own | message of up to 500 tokens | 8,192 | 6 | ")


def test_without_sessions_it_says_so(tmp_path: Path) -> None:
    assert run("--data", tmp_path) == "No recorded sessions, so there is nothing to measure. Fix: --data FOLDER.\n"
