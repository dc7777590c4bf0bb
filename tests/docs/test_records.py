"""docs/api.md: every parameter, cause of a digest, and report column of the paths for records, and no other."""

from typing import get_args

from proxy.endpoints.queries import UNITS
from proxy.endpoints.records import DEFAULT_BY, DEFAULT_LIMIT, DEFAULT_SINCE, PARAMETERS
from proxy.records.model import RECORD_LIMIT
from proxy.records.report import BY, COLUMNS
from proxy.summary.store import Cause
from proxy.telemetry.record import Verdict
from tests.docs.test_documents import API, spans, table
from tests.docs.test_reference import RECORDS


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
