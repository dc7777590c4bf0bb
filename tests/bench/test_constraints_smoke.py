"""Check the measure of stated rules on generated sessions."""

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.quality import constraints, langchain
from bench.quality.constraints import FORMS, OWN, READ, Session, demands, main, stated
from bench.quality.conversations import tool_loop
from tests.kit.upstream import faults


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


def test_it_prints_ours_beside_the_newest_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(langchain, "PYTHON", tmp_path / "none")
    output = run("--data", prepared(tmp_path), "--window", 8192, "--sessions", 1)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines()[2:]]
    assert [row[:4] for row in rows] == [["own", form, "8,192", "6"] for form in FORMS]
    for *_, ours, newest in rows:
        assert float(newest.removesuffix(" %")) < float(ours.removesuffix(" %")), output


def test_without_sessions_it_says_so(tmp_path: Path) -> None:
    assert run("--data", tmp_path) == "No recorded sessions, so there is nothing to measure. Fix: --data FOLDER.\n"
