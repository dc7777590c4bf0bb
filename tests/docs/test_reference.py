"""docs/reference/ and the tables of docs/api.md as the code is: each name has a meaning, and each meaning a name."""

import ast
import re
from collections.abc import Callable
from typing import get_args

import pytest

from proxy.endpoints.queries import UNITS
from proxy.endpoints.records import DEFAULT_BY, DEFAULT_LIMIT, DEFAULT_SINCE, PARAMETERS
from proxy.records.model import RECORD_LIMIT
from proxy.records.report import BY, COLUMNS
from proxy.summary.store import Cause
from proxy.telemetry.metrics import DEFINITIONS, REGISTRY
from proxy.telemetry.record import Verdict
from tests.docs.reference import FOLDER, NOTE, PAGES, ROOT, keys, logged, record_fields
from tests.docs.test_documents import API, spans, table

TELEMETRY = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
RECORDS = (FOLDER / "records.md").read_text(encoding="utf-8")
LOGS = ast.parse((ROOT / "proxy" / "telemetry" / "logs.py").read_text(encoding="utf-8"))


def metrics() -> dict[str, list[str]]:
    """Return the labels of each metric by the name that Prometheus reads."""
    return {metric.name: list(metric.labels) for metric in DEFINITIONS}


@pytest.mark.parametrize(("name", "made"), PAGES.items(), ids=PAGES)
def test_a_generated_page_is_documented_as_the_code_is(name: str, made: Callable[[], str]) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert written.startswith(NOTE.removesuffix(". Change the descriptions there.*"))
    assert written == made(), "run: python -m tests.docs.reference"


def test_there_is_no_other_page() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*PAGES, "records.md"}


def test_every_log_event_has_a_meaning() -> None:
    written = (FOLDER / "log-events.md").read_text(encoding="utf-8")
    assert "| MEANING |" not in written, "write the meaning in the page"
    assert {"store.breaker_opened", "task.crashed"} <= {*logged()}


def test_every_field_of_a_record_is_documented_and_no_other() -> None:
    names = [name for row in table(RECORDS, "record field") for name in spans(row[0])]
    assert sorted(names) == sorted(record_fields())


def test_every_field_of_the_line_for_a_request_is_documented_and_no_other() -> None:
    (made,) = (node for node in ast.walk(LOGS) if isinstance(node, ast.FunctionDef) and node.name == "fields")
    written = {key for node in ast.walk(made) for key in keys(node)} | {"request", "team", "model", "upstream"}
    section = TELEMETRY.partition("| request field |")[2].partition("\n\n")[0]
    first_cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    assert {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)} == written


def test_every_metric_is_defined_in_the_reference() -> None:
    exposed = {name for name in REGISTRY._names_to_collectors if name.startswith("compaction_")}
    assert metrics().keys() <= exposed
    assert {name.removesuffix("_total") for name in metrics()} == {
        re.sub(r"_(total|created|bucket|sum|count)$", "", name) for name in exposed
    }


def test_the_values_of_a_verdict_are_documented() -> None:
    (meaning,) = [row[1] for row in table(RECORDS, "record field") if row[0] == "`verdict`"]
    assert spans(meaning) == list(get_args(Verdict))


def test_every_cause_of_a_digest_is_documented_and_no_other() -> None:
    documented = [name for row in table(API, "cause of a digest") for name in spans(row[0])]
    assert sorted(documented) == sorted(get_args(Cause))


def test_every_column_of_a_report_is_documented_and_no_other() -> None:
    assert sorted(name for row in table(API, "report column") for name in spans(row[0])) == sorted(COLUMNS)


def test_every_parameter_is_documented_with_its_paths_and_default() -> None:
    rows = table(API, "query parameter")
    documented = {(path, name) for row in rows for name in spans(row[0]) for path in spans(row[1])}
    assert documented == {(path, name) for path, names in PARAMETERS.items() for name in names}
    told = {spans(row[0])[0]: row[2] for row in rows}
    assert spans(told["by"]) == [*BY, DEFAULT_BY]
    assert f"Default for reports: `{DEFAULT_SINCE}`" in told["since"]
    assert {span[-1] for span in spans(told["since"])} >= UNITS.keys()
    assert f"1 to {RECORD_LIMIT:,}. Default: {DEFAULT_LIMIT}." in told["limit"]
