"""docs/reference.md: every error code, log event, and metric of the program, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from proxy.errors import ConfigurationError, ProxyError
from proxy.telemetry.metrics import DEFINITIONS, REGISTRY
from tests.docs.metric_table import REFERENCE, updated

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
LOGS = ast.parse((ROOT / "proxy" / "telemetry" / "logs.py").read_text(encoding="utf-8"))
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def rows(heading: str) -> dict[str, list[str]]:
    """Return the cells of each row under a heading, by the name in the first cell."""
    section = DOCUMENT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found: dict[str, list[str]] = {}
    for line in section.splitlines():
        if named := re.match(r"\| `([^`]+)` \|", line):
            assert named[1] not in found, f"{named[1]} is listed twice"
            found[named[1]] = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[2:-1]]
    return found


def errors(root: type[ProxyError] = ProxyError) -> Iterator[type[ProxyError]]:
    """Yield every error class that a client may receive."""
    yield root
    for below in root.__subclasses__():
        if below is not ConfigurationError:
            yield from errors(below)


def calls(path: Path) -> list[ast.Call]:
    """Return the calls in a module."""
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def names(event: ast.expr, module: list[ast.Call]) -> list[str]:
    """Return the events of an expression: a literal, a prefix and a state, or an argument of ``_report``."""
    if isinstance(event, ast.Constant):
        return [str(event.value)]
    if isinstance(event, ast.JoinedStr):
        (prefix, _) = event.values
        assert isinstance(prefix, ast.Constant)
        return [f"{prefix.value}{state}" for state in ("opened", "closed")]
    reports = [call for call in module if isinstance(call.func, ast.Attribute) and call.func.attr == "_report"]
    assert reports, ast.dump(event)
    return [name for call in reports for name in names(call.args[0], [])]


def fields_of(call: ast.Call) -> set[str]:
    """Return the fields of a log call: its keywords, and the keys of dictionaries in it."""
    inner = (key for word in call.keywords if word.arg is None for node in ast.walk(word.value) for key in keys(node))
    named = {word.arg for word in call.keywords if word.arg is not None} | {*inner}
    raised = call.func.attr == "exception" if isinstance(call.func, ast.Attribute) else False
    return named - {"exc_info"} | ({"exception"} if raised or "exc_info" in named else set())


def keys(node: ast.AST) -> list[str]:
    """Return the keys of a dictionary in the source."""
    if not isinstance(node, ast.Dict):
        return []
    return [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]


def logged() -> dict[str, tuple[set[str], set[str]]]:
    """Return the levels and the fields of each log event in the source."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in (ROOT / "proxy").rglob("*.py"):
        module = calls(path)
        for call in module:
            match call.func:
                case ast.Attribute(value=ast.Name(id="log"), attr=level) if level in LEVELS:
                    for name in names(call.args[0], module):
                        levels, fields = found.setdefault(name, (set(), set()))
                        levels.add("error" if level == "exception" else level)
                        fields |= fields_of(call)
    return found


def metrics() -> dict[str, list[str]]:
    """Return the labels of each metric by the name that Prometheus reads."""
    return {metric.name: list(metric.labels) for metric in DEFINITIONS}


def test_every_error_code_is_documented_with_its_status_and_no_other() -> None:
    assert {code: int(cells[0]) for code, cells in rows("Error codes").items()} == {
        error.code: error.status for error in errors()
    }
    assert all(all(cells) for cells in rows("Error codes").values())


def test_every_log_event_is_documented_with_its_level_and_fields_and_no_other() -> None:
    section = rows("Log events").items()
    events = {name: cells for name, cells in section if len(cells) == 3}
    documented = {
        name: (set(cells[0].split(", ")), set(re.findall(r"`(\w+)`", cells[1]))) for name, cells in events.items()
    }
    assert {"store.breaker_opened", "task.crashed"} <= documented.keys()
    assert documented == logged()


def test_every_field_of_the_line_for_a_request_is_documented_and_no_other() -> None:
    (made,) = (node for node in ast.walk(LOGS) if isinstance(node, ast.FunctionDef) and node.name == "fields")
    written = {key for node in ast.walk(made) for key in keys(node)} | {"request", "team", "model", "upstream"}
    assert {name for name, cells in rows("Log events").items() if len(cells) == 1} == written


def test_every_metric_is_documented_with_its_labels_and_no_other() -> None:
    reference = REFERENCE.read_text(encoding="utf-8")
    assert updated(reference) == reference, "run: python -m tests.docs.metric_table"
    exposed = {name for name in REGISTRY._names_to_collectors if name.startswith("compaction_")}
    assert metrics().keys() <= exposed
    assert {name.removesuffix("_total") for name in metrics()} == {
        re.sub(r"_(total|created|bucket|sum|count)$", "", name) for name in exposed
    }
