"""The dashboard and the alert rules in deploy: each metric, label, and link exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.docs.test_reference import ROOT, metrics

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "compaction-proxy.json"
PROMTOOL = shutil.which("promtool")
ADDED_BY_PROMETHEUS = {"le", "instance", "job"}

promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt-get install prometheus")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    dashboard = json.loads(DASHBOARD.read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])[0]
            yield f"sum by ({label}) ({metric})"


def labels_of(metric: str) -> set[str]:
    base = re.sub(r"_(bucket|sum|count)$", "", metric)
    return set(metrics()[metric if metric in metrics() else base])


def test_each_metric_and_label_of_the_dashboard_and_the_alerts_exists() -> None:
    for expression in expressions():
        used = set(re.findall(r"\bcompaction_\w+", expression))
        assert used, expression
        known = set.union(*(labels_of(metric) for metric in used)) | ADDED_BY_PROMETHEUS
        grouped = {name for names in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for name in names.split(", ")}
        assert grouped <= known, expression
        for metric, matchers in re.findall(r"(compaction_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=", matchers)) <= labels_of(metric), expression


def test_each_alert_says_what_to_do() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    for rule in rules():
        (anchor,) = re.findall(r"docs/troubleshooting\.md#([a-z-]+)", rule["annotations"]["description"])
        assert anchor in anchors
        assert rule["labels"]["severity"] in ("warning", "critical")
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert re.search(rf"by \([^)]*\b{label}\b", rule["expr"]), label


@promtool
def test_promtool_accepts_the_rules() -> None:
    subprocess.run([str(PROMTOOL), "check", "rules", str(ALERTS)], check=True, capture_output=True, timeout=30)


@promtool
def test_promtool_accepts_the_metrics() -> None:
    done = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=_exposed(), capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


EXPOSE = """
import sys
from proxy.telemetry.metrics import REGISTRY
from prometheus_client import generate_latest
for metric in list(REGISTRY._collector_to_names):
    if names := getattr(metric, "_labelnames", ()):
        metric.labels(*names)
sys.stdout.buffer.write(generate_latest(REGISTRY))
"""
"""Prints every metric, those with labels with an example of each."""


def _exposed() -> bytes:
    return subprocess.run([sys.executable, "-c", EXPOSE], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
