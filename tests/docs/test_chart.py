"""The Helm chart renders the resources of the kustomize base, with the store and the configuration of its values."""

import json
import subprocess
import sys
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import pytest
import yaml

from proxy import __version__
from tests.docs.test_deploy import DEPLOY, in_yaml, of_kind

CHART = DEPLOY / "helm"
RENDER = """
import json, sys
from helm_python.chart import Chart
values = json.loads(sys.argv[2])
print(json.dumps(Chart.load(sys.argv[1]).render(values, name="release", namespace="default")))
"""
"""Runs in a process of its own, because the library brings another runtime."""

helm = pytest.mark.skipif(find_spec("helm_python") is None, reason="no Helm: pip install helm-python-sdk")


def rendered(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the chart's resources by kind."""
    command = [sys.executable, "-c", RENDER, str(CHART), json.dumps(values)]
    files = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    found = [yaml.safe_load(text) for name, text in files.items() if name.endswith(".yaml")]
    return {resource["kind"]: resource for resource in found if resource}


def only(deployment: dict[str, Any]) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_the_chart_has_this_version_and_the_configuration_of_the_fleet() -> None:
    chart = in_yaml(CHART / "Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    assert (CHART / "files" / "config.yaml").read_bytes() == (DEPLOY / "config.yaml").read_bytes()


@helm
@pytest.mark.parametrize("kind", ["ServiceAccount", "Service", "PodDisruptionBudget", "NetworkPolicy"])
def test_a_resource_is_that_of_the_base(kind: str) -> None:
    assert rendered(networkPolicy={"storePort": None})[kind] == of_kind(kind)


@helm
def test_the_deployment_is_that_of_the_base_with_a_store() -> None:
    deployment = deepcopy(of_kind("Deployment"))
    reference = {"secretKeyRef": {"name": "compaction-proxy", "key": "COMPACTION_STORE_URL"}}
    only(deployment)["env"].append({"name": "COMPACTION_STORE_URL", "valueFrom": reference})
    only(deployment)["image"] = f"compaction-proxy:{__version__}"
    made = rendered()
    assert list(made["Deployment"]["spec"]["template"]["metadata"].pop("annotations")) == ["checksum/config"]
    assert made["Deployment"] == deployment
    assert made["ConfigMap"]["data"]["config.yaml"].strip() == (DEPLOY / "config.yaml").read_text().strip()
    egress = made["NetworkPolicy"]["spec"]["egress"]
    assert [port["port"] for rule in egress for port in rule["ports"]] == [53, 53, 443, 6379]


@helm
def test_values_change_what_they_name() -> None:
    image = {"repository": "registry.example/proxy", "tag": "x"}
    changed = rendered(image=image, replicas=3, config="store: {}\n", networkPolicy={"enabled": False})
    assert "NetworkPolicy" not in changed
    assert changed["Deployment"]["spec"]["replicas"] == 3
    assert only(changed["Deployment"])["image"] == "registry.example/proxy:x"
    assert changed["ConfigMap"]["data"]["config.yaml"].strip() == "store: {}"
    checksums = [made["Deployment"]["spec"]["template"]["metadata"]["annotations"] for made in (changed, rendered())]
    assert checksums[0] != checksums[1]
