"""Generate docs/reference/ and the JSON Schema from the code: ``python -m tests.docs.reference``."""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from proxy.cli.commands import main
from proxy.errors import ConfigurationError, ProxyError
from proxy.http.headers import Own
from proxy.telemetry.metrics import DEFINITIONS
from proxy.telemetry.record import Cost, Reason, Refusal, RequestRecord, UpstreamCall, Usage
from proxy.telemetry.record_json import record_json
from tests.docs.config_schema import SCHEMA_FILE, docstrings, schema_text

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
NOTE = "*Generated from the code by `python -m tests.docs.reference`. Change the descriptions there.*"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
LINKED = {
    "TriggerField": "[trigger](../configuration.md#triggers)",
    "KeepField": "[keep](../configuration.md#triggers)",
    "ReserveField": "tokens, or `{fraction: F}`",
}
OVERRIDES = "policies.NAME.models[]"
"""The section with the settings of a policy once more."""
SETTING = ("setting", "meaning", "values", "default")
VARIABLE = r"\$\{"

Node = Mapping[str, Any]


def page(title: str, intro: str, parts: Iterable[str], note: str = NOTE) -> str:
    """Return a page with a title, an introduction, and its parts, below a note on where they come from."""
    return "\n\n".join([note, f"# {title}", *filter(None, [intro]), *parts]) + "\n"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    first = [*heads]
    lines = [first, ["---"] * len(first), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def text(description: str | None) -> str:
    """Return a description as one line of Markdown, with asterisks and names of settings as code."""
    joined = " ".join((description or "").replace("``", "`").split())
    parts = re.split(r"(`[^`]*`)", joined)
    return "".join(part if part.startswith("`") else part.replace("*", r"\*") for part in parts)


def code(values: Iterable[object]) -> str:
    """Return values as code, separated by commas."""
    return ", ".join(f"`{value}`" for value in values)


def settings() -> str:
    """Return the page of settings, from the JSON Schema of the configuration."""
    schema: Node = json.loads(schema_text())
    intro = "[Configuration](../configuration.md) shows how to use them. A dash means that there is none."
    return page("Settings", intro, _sections(schema["$defs"], schema, "", ""))


def _sections(kinds: Node, section: Node, path: str, about: str) -> Iterator[str]:
    """Yield a section of the configuration, and then each of its own sections."""
    below = f"{path}." if path else ""
    required = section.get("required", ())
    inner = {name: _section(kinds, node) for name, node in section["properties"].items()}
    if path == OVERRIDES:
        inner = {"match": None}
    rows = [
        _setting(kinds, f"{below}{name}", section["properties"][name], required=name in required)
        for name, found in inner.items()
        if found is None
    ]
    title = f"`{path.removesuffix('[]')}`" if path else "The file"
    yield "\n\n".join(filter(None, [f"## {title}", text(about), rows and table(SETTING, rows)]))
    for name, found in inner.items():
        if found is not None:
            about = section["properties"][name].get("description") or found[0].get("description")
            yield from _sections(kinds, found[0], f"{below}{name}{found[1]}", about)


def _section(kinds: Node, node: Node) -> tuple[Node, str] | None:
    """Return the section in a node of the schema, and how its path continues; ``None`` for other nodes."""
    match node:
        case {"$ref": name}:
            kind = name.rsplit("/", 1)[1]
            return None if kind in LINKED else _section(kinds, kinds[kind])
        case {"properties": _}:
            return node, ""
        case {"anyOf": nodes}:
            return next(filter(None, (_section(kinds, one) for one in nodes)), None)
        case {"patternProperties": named}:
            found, on = _section(kinds, next(iter(named.values()))), ".NAME"
        case {"items": inner}:
            found, on = _section(kinds, inner), "[]"
        case _:
            return None
    return found and (found[0], on)


def _setting(kinds: Node, path: str, node: Node, *, required: bool) -> list[str]:
    default = node.get("default")
    stated = yaml.safe_dump(default, default_flow_style=True, width=10_000).strip().removesuffix("\n...")
    shown = "required" if required else "–" if default is None else f"`{stated}`"
    return [f"`{path}`", text(node.get("description")), _values(kinds, node), shown]


def _values(kinds: Node, node: Node) -> str:
    match node:
        case {"$ref": name}:
            kind = name.rsplit("/", 1)[1]
            return LINKED.get(kind) or _values(kinds, kinds[kind])
        case {"enum": values}:
            return code(values)
        case {"anyOf": nodes}:
            stated = (one for one in nodes if one.get("type") != "null" and one.get("pattern") != VARIABLE)
            return " or ".join(dict.fromkeys(_values(kinds, one) for one in stated))
        case {"type": "array"}:
            return f"list of {_values(kinds, node.get('items', {}))}"
        case {"type": "integer" | "number"}:
            bounds = {"minimum": "from", "exclusiveMinimum": "over", "maximum": "to"}
            return " ".join(["number", *(f"{word} {node[key]:,}" for key, word in bounds.items() if key in node)])
    return {"object": "mapping", "boolean": "`true`, `false`"}.get(node.get("type", ""), "text")


def commands() -> str:
    """Return the page of all commands with their options."""
    return page("Commands", "`-h` shows this help, too.", _commands(main, "compaction-proxy"))


def _commands(group: click.Group, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
            continue
        arguments = " ".join(
            f"[{shown}]" if not one.required else shown
            for one in command.params
            if isinstance(one, click.Argument)
            for shown in [(one.name or "").upper()]
        )
        options = [one for one in command.params if isinstance(one, click.Option)]
        rows = [[code(one.opts), text(one.help), f"`{one.default}`" if one.show_default else "–"] for one in options]
        parts = [f"## `{path} {name}`", f"    {path} {name} [OPTIONS] {arguments}".rstrip(), text(command.help)]
        yield "\n\n".join([*parts, *([table(("option", "meaning", "default"), rows)] if rows else [])])


def http() -> str:
    """Return the page of response headers and error codes."""
    headers = ([f"`{Own[name]}`", text(meaning)] for name, meaning in docstrings(Own).items())
    codes = ([f"`{one.code}`", str(one.status), text((one.__doc__ or "").partition("\n")[0])] for one in errors())
    return page(
        "Response headers and error codes",
        "[The HTTP API](../api.md) describes paths and the form of errors.",
        [
            f"## Response headers\n\n{table(('response header', 'value'), headers)}",
            f"## Error codes\n\n{table(('error code', 'status', 'meaning'), codes)}",
        ],
    )


def errors(root: type[ProxyError] = ProxyError) -> Iterator[type[ProxyError]]:
    """Yield every error class that a client may receive."""
    yield root
    for below in root.__subclasses__():
        if below is not ConfigurationError:
            yield from errors(below)


def record_fields() -> list[str]:
    """Return the names of all values in a record."""
    usage = Usage(*[1] * 11, "flex", "us", (Usage(1, 1),))
    record = RequestRecord("a", 0.0, reason=Reason("tokens"), usage=usage, cost=Cost(), calls=[UpstreamCall("error")])
    record.retention, record.refused_by = {"files": (1, 0, 0)}, Refusal("spend", "", 0.0)
    return [*_fields(record_json(record))]


def _fields(value: Node, above: str = "") -> Iterator[str]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _fields(inner, f"{above}{name}.")
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield from _fields(inner[0], f"{above}{name}[].")
        else:
            yield f"{above}{name}"


def metrics() -> str:
    """Return the page of metrics."""
    rows = (
        [f"`{name}`", "; ".join(f"`{label}`: {values}" for label, values in labels.items()), meaning]
        for name, labels, meaning in DEFINITIONS
    )
    intro = "[Logs, metrics, and traces](../telemetry.md#metrics) describes their labels."
    return page("Metrics", intro, [table(("metric", "labels", "meaning"), rows)])


def log_events() -> str:
    """Return the page of log events. The last column is written in the page, and the code has the others."""
    written = (FOLDER / "log-events.md").read_text(encoding="utf-8")
    meanings = dict(re.findall(r"^\| `([\w.]+)` \|.* \| (.+) \|$", written, re.MULTILINE))
    rows = (
        [f"`{name}`", ", ".join(sorted(levels, reverse=True)), code(sorted(fields)), meanings.get(name, "MEANING")]
        for name, (levels, fields) in sorted(logged().items())
    )
    intro = "[Logs, metrics, and traces](../telemetry.md#log-lines) describes the format."
    note = "*Generated from the code by `python -m tests.docs.reference`, but for the meanings. Change those here.*"
    return page("Log events", intro, [table(("log event", "level", "fields", "meaning"), rows)], note)


def logged() -> dict[str, tuple[set[str], set[str]]]:
    """Return the levels and the fields of each log event in the source."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in (ROOT / "proxy").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in module:
            match call.func:
                case ast.Attribute(value=ast.Name(id="log"), attr=level) if level in LEVELS:
                    for name in _events(call.args[0], module):
                        levels, fields = found.setdefault(name, (set(), set()))
                        levels.add("error" if level == "exception" else level)
                        fields |= _fields_of(call)
    return found


def _events(event: ast.expr, module: list[ast.Call]) -> list[str]:
    """Return the events of an expression: a literal, a prefix and a state, or an argument of ``_report``."""
    if isinstance(event, ast.Constant):
        return [str(event.value)]
    if isinstance(event, ast.JoinedStr):
        (prefix, _) = event.values
        assert isinstance(prefix, ast.Constant)
        return [f"{prefix.value}{state}" for state in ("opened", "closed")]
    reports = [call for call in module if isinstance(call.func, ast.Attribute) and call.func.attr == "_report"]
    assert reports, ast.dump(event)
    return [name for call in reports for name in _events(call.args[0], [])]


def _fields_of(call: ast.Call) -> set[str]:
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


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings,
    "commands.md": commands,
    "http.md": http,
    "metrics.md": metrics,
    "log-events.md": log_events,
}


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    for name, made in PAGES.items():
        (FOLDER / name).write_text(made(), encoding="utf-8")
