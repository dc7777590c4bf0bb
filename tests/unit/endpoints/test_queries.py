"""Test how the parameters of a query are read."""

import pytest

from proxy.endpoints.queries import labels, parameters, time_in
from proxy.errors import RequestError

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30m", NOW - 1_800),
        ("24h", NOW - 86_400),
        ("7d", NOW - 604_800),
        ("2w", NOW - 1_209_600),
        ("99999w", 0),
        ("0001-01-01T00:00:00+23:00", 0),
        ("9999-12-31T23:59:59-23:00", 253_402_214_400),
        ("1970-01-02", 86_400),
        ("1970-01-02T01:00:00Z", 90_000),
        ("1970-01-02T01:00:00 01:00", 86_400),
    ],
)
def test_times_are_durations_or_dates(text: str, seconds: float) -> None:
    assert time_in("since", text, NOW) == seconds


@pytest.mark.parametrize("text", ["", "7", "7y", "-7d", "1234567d", "2026-13-01", "today"])
def test_another_text_gets_an_error_with_the_forms(text: str) -> None:
    with pytest.raises(RequestError, match="since: must be a duration like"):
        time_in("since", text, NOW)


def test_empty_parameters_count_as_omitted_and_lists_have_no_duplicates() -> None:
    assert parameters(b"team=&limit=5", ("team", "limit")) == {"limit": "5"}
    assert labels("by", "team, day,team", ("team", "day")) == ("team", "day")
    with pytest.raises(RequestError, match="at most 200 characters"):
        parameters(b"team=" + b"a" * 201, ("team",))
