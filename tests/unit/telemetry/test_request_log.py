"""Check which requests get a log line, its level, and the names in other lines."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy.telemetry.logs import RequestLog, fields, is_notable, is_slow, request_names
from proxy.telemetry.record import HIDDEN_MODEL, Cost, Reason, RequestRecord, UpstreamCall, Usage, current


def record(**changes: Any) -> RequestRecord:
    return RequestRecord("id", 0.0, **{"status": 200, "calls": [UpstreamCall("accepted", 200, 10.0)], **changes})


TWICE = [UpstreamCall("overflow", 400), UpstreamCall("accepted", 200)]


@pytest.mark.parametrize(
    ("changes", "notable"),
    [
        ({}, False),
        ({"verdict": "off"}, False),
        ({"verdict": "shadow"}, False),
        ({"verdict": "shadow", "forecast": 9}, True),
        ({"verdict": "compacted"}, True),
        ({"verdict": "failed"}, True),
        ({"verdict": "refused"}, True),
        ({"calls": TWICE}, True),
        ({"status": 400}, True),
        ({"status": 499, "error": "client_disconnected"}, True),
        ({"error": "upstream_interrupted"}, True),
        ({"phases": {"body": 500.0, "first_byte": 1_600.0}}, True),
        ({"phases": {"body": 700.0, "first_byte": 1_600.0, "total": 9_000.0}}, False),
        ({"phases": {"first_byte": 1_600.0}, "calls": []}, False),
        ({"phases": {"total": 9_000.0}}, False),
    ],
)
def test_a_request_is_notable_if_it_failed_or_the_proxy_changed_it(changes: dict[str, Any], *, notable: bool) -> None:
    one = record(**changes)
    assert is_notable(one) is notable
    assert is_slow(one) is (notable and "phases" in changes)


@pytest.mark.parametrize(
    ("requests", "changes", "levels"),
    [
        ("none", {"status": 500}, []),
        ("notable", {}, []),
        ("all", {}, ["info"]),
        ("all", {"kind": "summary", "status": 500}, []),
        ("notable", {"status": 404}, ["info"]),
        ("notable", {"status": 502}, ["warning"]),
        ("notable", {"error": "upstream_interrupted"}, ["warning"]),
    ],
)
def test_the_setting_selects_requests(requests: Any, changes: dict[str, Any], levels: list[str]) -> None:
    with capture_logs() as logs:
        RequestLog(lambda: requests).add(record(**changes))
    assert [line["log_level"] for line in logs] == levels


def test_a_line_has_the_figures_and_omits_unknown_ones() -> None:
    full = record(
        model="gpt-5",
        reason=Reason("fraction", 100, 120),
        before=120,
        sent=50,
        usage=Usage(input=52),
        cost=Cost(sent=3 * 10**9),
        calls=[UpstreamCall("upstream_timeout"), UpstreamCall("accepted", 200)],
    )
    line = fields(full)
    assert (line["trigger"], line["level_reached"], line["size"]) == ("fraction", 100, 120)
    assert (line["tokens_before"], line["tokens_sent"], line["tokens_reported"]) == (120, 50, 52)
    assert (line["attempts"], line["retries"], line["cost_usd"]) == (["upstream_timeout", 200], 1, 0.003)
    assert not fields(record()).keys() & {"team", "model", "trigger", "cost_usd", "error", "slow"}


def test_lines_name_the_request_that_started_their_task() -> None:
    async def named() -> dict[str, Any]:
        return dict(request_names(None, "info", {"event": "x", "upstream": "other"}))

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        before = await named()
        current.set(record(team="blue", model="gpt-5", upstream="main"))
        return before, await asyncio.create_task(named())

    before, during = asyncio.run(both())
    assert before == {"event": "x", "upstream": "other"}
    assert during == {"event": "x", "request": "id", "team": "blue", "model": "gpt-5", "upstream": "other"}


def test_text_that_is_not_a_models_name_is_not_logged() -> None:
    assert request_names(None, "info", {"event": "x", "model": "what is this"})["model"] == HIDDEN_MODEL
