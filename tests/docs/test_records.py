"""docs/reference.md: every parameter, record field, and report column of the paths for records, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from proxy.endpoints.queries import UNITS
from proxy.endpoints.records import DEFAULT_BY, DEFAULT_LIMIT, DEFAULT_SINCE, PARAMETERS
from proxy.records.model import RECORD_LIMIT
from proxy.records.report import BY, COLUMNS
from proxy.summary.store import Cause
from proxy.telemetry.record import Cost, Reason, RequestRecord, UpstreamCall, Usage, Verdict
from proxy.telemetry.record_json import PHASES, record_json
from tests.docs.test_documents import REFERENCE, spans, table


def fields(value: dict[str, Any], above: str = "") -> Iterator[str]:
    """Yield the names of all values in a record."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from fields(inner, f"{above}{name}.")
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield from fields(inner[0], f"{above}{name}[].")
        else:
            yield f"{above}{name}"


def test_every_field_of_a_record_is_documented_and_no_other() -> None:
    usage = Usage(*[1] * 11, "flex", "us", (Usage(1, 1),))
    record = RequestRecord("a", 0.0, reason=Reason("tokens"), usage=usage, cost=Cost(), calls=[UpstreamCall("error")])
    record.retention = {"files": (1, 0, 0)}
    documented = [name for row in table(REFERENCE, "record field") for name in spans(row[0])]
    assert sorted(documented) == sorted(fields(record_json(record)))
    shown = {spans(row[0])[0]: spans(row[1]) for row in table(REFERENCE, "record field")}
    assert shown["verdict"] == list(get_args(Verdict))
    assert {f"ms.{name}" for name in PHASES} <= set(documented)


def test_every_cause_of_a_digest_is_documented_and_no_other() -> None:
    documented = [name for row in table(REFERENCE, "cause of a digest") for name in spans(row[0])]
    assert sorted(documented) == sorted(get_args(Cause))


def test_every_column_of_a_report_is_documented_and_no_other() -> None:
    assert sorted(name for row in table(REFERENCE, "report column") for name in spans(row[0])) == sorted(COLUMNS)


def test_every_parameter_is_documented_with_its_paths_and_default() -> None:
    rows = table(REFERENCE, "query parameter")
    documented = {(path, name) for row in rows for name in spans(row[0]) for path in spans(row[1])}
    assert documented == {(path, name) for path, names in PARAMETERS.items() for name in names}
    told = {spans(row[0])[0]: row[2] for row in rows}
    assert spans(told["by"]) == [*BY, DEFAULT_BY]
    assert f"Default for reports: `{DEFAULT_SINCE}`" in told["since"]
    assert {span[-1] for span in spans(told["since"])} >= UNITS.keys()
    assert f"1 to {RECORD_LIMIT:,}. Default: {DEFAULT_LIMIT}." in told["limit"]
