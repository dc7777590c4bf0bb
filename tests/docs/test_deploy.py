"""The files in deploy fit the proxy and each other: metrics, labels, links, configurations, ports, and paths."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from proxy.cli.commands import main
from proxy.config import Settings
from tests.docs.test_dockerfile import last
from tests.docs.test_reference import ROOT, metrics
from tests.kit.configurations import loads

DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
COMPOSE = DEPLOY / "compose.yaml"
DASHBOARD = DEPLOY / "grafana" / "compaction-proxy.json"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("development", "production")
PROMTOOL = shutil.which("promtool")
KUSTOMIZE = next(
    ([path, verb] for name, verb in (("kustomize", "build"), ("kubectl", "kustomize")) if (path := shutil.which(name))),
    None,
)
ENVIRONMENT = {
    "COMPACTION_STORE_URL": "redis://:password@valkey:6379/0",
    "COMPACTION_STORE_KEY": "0" * 64,
    "OPENAI_API_KEY": "sk-test",
}
OTHERS = {"monitoring.coreos.com/v1"}
"""Kinds that Kubernetes doesn't have: those of Prometheus Operator."""

ADDED_BY_PROMETHEUS = {"le", "instance", "job"}

promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt-get install prometheus")
kustomize = pytest.mark.skipif(
    KUSTOMIZE is None, reason="no kustomize: go install sigs.k8s.io/kustomize/kustomize/v5@latest"
)


schemas = pytest.mark.skipif(
    find_spec("kubernetes_validate") is None, reason="no schemas of Kubernetes: pip install kubernetes-validate"
)
compose_parser = pytest.mark.skipif(
    find_spec("compose_spec") is None, reason="no parser of Compose files: pip install compose-spec"
)


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
    own = {"le"} if metric.endswith("_bucket") else set()
    return own | set(metrics()[metric if metric in metrics() else base])


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
def test_promtool_accepts_the_metrics() -> None:
    done = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=_exposed(), capture_output=True, timeout=120, check=False
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


def in_yaml(path: Path) -> Any:
    """The only document of a file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def fleet() -> Settings:
    return loads((DEPLOY / "config.yaml").read_bytes(), ENVIRONMENT)


def variables() -> set[str]:
    """The environment variables that the configuration needs."""
    return set(re.findall(r"\$\{(\w+)", (DEPLOY / "config.yaml").read_text()))


def metrics_port() -> int:
    address = fleet().metrics.address
    assert address is not None
    return address[1]


def test_the_configuration_of_a_fleet_has_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables() == ENVIRONMENT.keys()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(main, ["check", str(DEPLOY / "config.yaml"), "--strict"])
    assert (done.exit_code, done.output.endswith(": fine\n")) == (0, True), done.output
    assert (KUBERNETES / "base" / "config.yaml").read_bytes() == (DEPLOY / "config.yaml").read_bytes()


def services() -> dict[str, dict[str, Any]]:
    compose: dict[str, dict[str, Any]] = in_yaml(COMPOSE)
    return compose["services"]


def proxies() -> dict[str, dict[str, Any]]:
    return {name: service for name, service in services().items() if service["image"].startswith("compaction-proxy:")}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """The targets of a service's volumes, with their sources."""
    parts = [volume.split(":") for volume in service["volumes"]]
    return {target: source for source, target, *_ in parts}


def test_the_compose_file_names_only_what_exists() -> None:
    compose = in_yaml(COMPOSE)
    used = set()
    for name, service in services().items():
        for source in mounts(service).values():
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], (
                name,
                source,
            )
        assert set(service["networks"]) <= compose["networks"].keys()
        assert set(service.get("depends_on", ())) <= services().keys()
        used |= set(re.findall(r"\$\{(\w+):\?\}", json.dumps(service)))
    assert used == set(re.findall(r"^(\w+)=", (DEPLOY / "env.example").read_text(), re.MULTILINE))


@compose_parser
def test_a_parser_of_the_compose_specification_accepts_the_compose_file() -> None:
    parse = import_module("compose_spec").PyCompose.from_yaml
    text = re.sub(r"\$\{\w+(?::\?|:-(\w+))\}", lambda found: found[1] or "value", COMPOSE.read_text())
    compose = yaml.safe_load(text)
    assert set(parse(yaml.safe_dump(compose)).service_names()) == services().keys()
    compose["services"]["valkey"]["healthcheck"]["intervall"] = "10s"
    with pytest.raises(ValueError, match="intervall"):
        parse(yaml.safe_dump(compose))


def test_the_services_of_the_compose_file_are_hardened() -> None:
    for name, service in services().items():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
    options = " ".join(services()["valkey"]["command"])
    assert "--requirepass ${VALKEY_PASSWORD:?} " in options
    assert "--maxmemory-policy volatile-lru" in options, "as docs/stores.md says"


def test_the_replicas_in_the_compose_file_fit_the_image_and_the_configuration() -> None:
    assert len(proxies()) == 2
    for service in proxies().values():
        assert service["environment"].keys() == variables()
        command, option, config = service["command"]
        assert (command, option, mounts(service)[config]) == ("serve", "--config", "./config.yaml")
        assert int(service["stop_grace_period"].rstrip("s")) > fleet().server.drain + 5
        user, group = last("USER").split(":")
        assert f"{last('VOLUME')}:uid={user},gid={group},mode=0700" in service["tmpfs"]
        assert "test" not in service["healthcheck"], "the image has one"
        assert set(service["networks"]) == {"clients", "store", "metrics"}


def test_the_load_balancer_reaches_all_replicas_and_holds_nothing_back() -> None:
    balancer = services()["load-balancer"]
    text = (DEPLOY / mounts(balancer)["/etc/nginx/nginx.conf"]).read_text()
    port = fleet().server.port
    assert set(re.findall(r"^ +server ([\w.:-]+) resolve ", text, re.MULTILINE)) == {
        f"{name}:{port}" for name in proxies()
    }
    directives = dict(re.findall(r"^ +(\w+) ([^;{]+);", text, re.MULTILINE))
    assert (directives["proxy_buffering"], directives["proxy_request_buffering"]) == ("off", "off")
    assert (directives["proxy_http_version"], directives["client_max_body_size"]) == ("1.1", "0")
    assert int(directives["proxy_read_timeout"].rstrip("s")) > fleet().server.deadline
    (published,) = balancer["ports"]
    assert published.endswith(f":{directives['listen']}")
    assert f":{directives['listen']}/livez" in balancer["healthcheck"]["test"][-1]


def test_prometheus_and_grafana_find_their_files_and_each_other() -> None:
    prometheus, grafana = services()["prometheus"], services()["grafana"]
    config = in_yaml(DEPLOY / mounts(prometheus)["/etc/prometheus/prometheus.yml"])
    assert [DEPLOY / mounts(prometheus)[rule] for rule in config["rule_files"]] == [ALERTS]
    (scraped,) = config["scrape_configs"]
    (targets,) = (static["targets"] for static in scraped["static_configs"])
    assert set(targets) == {f"{name}:{metrics_port()}" for name in proxies()}
    provisioning = DEPLOY / mounts(grafana)["/etc/grafana/provisioning"]
    (source,) = in_yaml(provisioning / "datasources" / "prometheus.yaml")["datasources"]
    assert (source["url"], source["isDefault"]) == ("http://prometheus:9090", True)
    (provider,) = in_yaml(provisioning / "dashboards" / "compaction-proxy.yaml")["providers"]
    assert DEPLOY / mounts(grafana)[f"{provider['options']['path']}/{DASHBOARD.name}"] == DASHBOARD
    shared = {"metrics"} & set(prometheus["networks"]) & set(grafana["networks"])
    assert shared == {"metrics"}


def written(folder: str) -> list[dict[str, Any]]:
    """The resources and patches in a folder of the Kubernetes files."""
    files = sorted((KUBERNETES / folder).glob("*.yaml"))
    return [in_yaml(path) for path in files if path.name not in ("kustomization.yaml", "config.yaml")]


def of_kind(kind: str, folder: str = "base") -> dict[str, Any]:
    (found,) = [each for each in written(folder) if isinstance(each, dict) and each["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    template: dict[str, Any] = of_kind("Deployment")["spec"]["template"]
    return template


def container() -> dict[str, Any]:
    (found,) = pod()["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_each_selector_matches_the_pods() -> None:
    labels = pod()["metadata"]["labels"]
    selectors = [
        of_kind("Deployment")["spec"]["selector"]["matchLabels"],
        of_kind("Service")["spec"]["selector"],
        of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        *(each["labelSelector"]["matchLabels"] for each in pod()["spec"]["topologySpreadConstraints"]),
    ]
    assert [selector for selector in selectors if not selector.items() <= labels.items()] == []
    monitor = of_kind("ServiceMonitor", "overlays/production")["spec"]
    service = of_kind("Service")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {each["port"] for each in monitor["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= {port["name"] for port in container()["ports"]}
    assert pod()["spec"]["serviceAccountName"] == of_kind("ServiceAccount")["metadata"]["name"]


def test_ports_probes_and_grace_periods_are_those_of_the_configuration() -> None:
    settings = fleet()
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"http": settings.server.port, "metrics": metrics_port()}
    paths = {name: container()[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in paths.items()} == {
        "startup": "/livez",
        "liveness": "/livez",
        "readiness": "/readyz",
    }
    assert {probe["port"] for probe in paths.values()} == {"http"}
    served = (ROOT / "docs" / "api.md").read_text()
    assert "| `GET /livez`, `GET /readyz` |" in served
    pause = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["spec"]["terminationGracePeriodSeconds"] >= settings.server.drain + pause + 5
    ingress = of_kind("NetworkPolicy")["spec"]["ingress"]
    assert {port["port"] for rule in ingress for port in rule["ports"]} == set(ports.values())


def test_the_pods_are_hardened_and_run_as_the_images_user() -> None:
    spec, context = pod()["spec"], pod()["spec"]["securityContext"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == last("USER")
    assert (context["runAsNonRoot"], context["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    own = container()["securityContext"]
    assert (own["readOnlyRootFilesystem"], own["allowPrivilegeEscalation"]) == (True, False)
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert spec["automountServiceAccountToken"] is False
    mounted = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in spec["volumes"]}
    assert {mounted["state"], mounted["temporary"]} == {last("VOLUME"), "/tmp"}  # noqa: S108
    assert container()["args"] == ["serve", "--config", f"{mounted['configuration']}/config.yaml"]


def test_the_autoscaler_uses_a_metric_of_the_proxy() -> None:
    spec = of_kind("HorizontalPodAutoscaler", "overlays/production")["spec"]
    assert [metric["pods"]["metric"]["name"] in metrics() for metric in spec["metrics"]] == [True]
    assert spec["minReplicas"] == 3
    (rule,) = re.findall(r"seriesQuery: (\w+)\{", (ROOT / "docs" / "fleet.md").read_text())
    (metric,) = spec["metrics"]
    assert rule == metric["pods"]["metric"]["name"]
    assert int(metric["pods"]["target"]["averageValue"]) == fleet().server.max_concurrent / 2
    target, deployment = spec["scaleTargetRef"], of_kind("Deployment")
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    assert "replicas" not in deployment["spec"]


def rendered_by_kustomize(overlay: str) -> dict[str, dict[str, Any]]:
    assert KUSTOMIZE is not None
    done = subprocess.run(
        [*KUSTOMIZE, str(KUBERNETES / "overlays" / overlay)], capture_output=True, check=True, timeout=120
    )
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}


@schemas
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_resources_have_the_fields_of_their_kinds(version: str) -> None:
    """Patches have fewer fields than resources, so only kustomize's output covers them."""
    validation = import_module("kubernetes_validate")
    resources = [*written("base"), *written("overlays/production")]
    if KUSTOMIZE is not None:
        resources += [each for overlay in OVERLAYS for each in rendered_by_kustomize(overlay).values()]
    whole = [each for each in resources if isinstance(each, dict) and each["apiVersion"] not in OTHERS]
    whole = [each for each in whole if each["kind"] != "Deployment" or "selector" in each["spec"]]
    assert len(whole) >= 7
    for resource in whole:
        validation.validate(resource, version, strict=True)
    wrong = deepcopy(of_kind("Deployment"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(validation.ValidationError, match="readinesProbe"):
        validation.validate(wrong, version, strict=True)


@kustomize
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_renders_an_overlay(overlay: str) -> None:
    rendered = rendered_by_kustomize(overlay)
    (rendered_container,) = rendered["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert {variable["name"] for variable in rendered_container["env"]} == variables()
    assert rendered_container["image"] == "compaction-proxy:latest"
    volumes = rendered["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert rendered["ConfigMap"]["metadata"]["name"] in {volume.get("configMap", {}).get("name") for volume in volumes}
    loads(rendered["ConfigMap"]["data"]["config.yaml"].encode(), ENVIRONMENT)
    egress = {port["port"] for rule in rendered["NetworkPolicy"]["spec"]["egress"] for port in rule["ports"]}
    assert (6379 in egress) is (overlay == "production")
