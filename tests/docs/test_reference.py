"""docs/reference/: generated pages, as the code is now. Each name has a meaning, and each meaning has a name."""

import ast
import re
from collections.abc import Callable

import pytest

from proxy.telemetry.metrics import DEFINITIONS, REGISTRY
from tests.docs.reference import FOLDER, NOTE, PAGES, ROOT, keys, logged, record_fields
from tests.docs.test_documents import spans, table

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
