"""The stack of deploy/compose.yaml without containers: its programs run with its configuration files.

The copies of the files have other addresses and paths, a team's key, and shorter intervals of Prometheus.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.server.loopback import serve
from tests.docs.test_deploy import ALERTS, DASHBOARD, DEPLOY, in_yaml, proxies, services
from tests.kit.program import Program, free_port, program
from tests.kit.redis_server import MISSING, PROGRAM, redis_server
from tests.kit.scripted import chat, client, key_hash
from tests.kit.upstream import StandIn
from tests.kit.waiting import until

NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
PROMETHEUS = shutil.which("prometheus")
SECRETS = {
    "OPENAI_API_KEY": "sk-upstream",
    "COMPACTION_STORE_KEY": "0" * 64,
    "VALKEY_PASSWORD": "5f2e",
    "GRAFANA_PASSWORD": "unused",
}
KEY = "sk-team-example"

pytestmark = [
    pytest.mark.skipif(NGINX is None, reason="no nginx: apt-get install nginx-light"),
    pytest.mark.skipif(PROMETHEUS is None, reason="no Prometheus: apt-get install prometheus"),
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
]


def interpolated(text: str) -> str:
    """Replace variables as Compose does."""
    return re.sub(r"\$\{(\w+)(?::\?|:-(\w+))\}", lambda found: SECRETS.get(found[1], found[2]), text)


def replaced(text: str, changes: Mapping[str, str]) -> str:
    """Replace strings, each of which occurs."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@contextlib.contextmanager
def running(*command: str, log: Path) -> Iterator[None]:
    """Run a program as long as the block runs."""
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


@contextlib.contextmanager
def replica(name: str, valkey: str, upstream: str, metrics: int, folder: Path) -> Iterator[Program]:
    """Run a replica with its environment from the Compose file."""
    config = folder / f"{name}.yaml"
    changes = {
        "host: 0.0.0.0": "host: 127.0.0.1",
        "listen: 0.0.0.0:9090": f"listen: 127.0.0.1:{metrics}",
        "provider: openai": f"provider: openai\n    base_url: {upstream}/v1",
        "sha256:" + "0" * 64: key_hash(KEY),
    }
    config.write_text(replaced((DEPLOY / "config.yaml").read_text(), changes))
    environment = {name: interpolated(value) for name, value in proxies()[name]["environment"].items()}
    environment["COMPACTION_STORE_URL"] = replaced(environment["COMPACTION_STORE_URL"], {"valkey:6379": valkey})
    with program(config, log=folder / f"{name}.log", env={**os.environ, **environment}) as started:
        yield started


@contextlib.contextmanager
def load_balancer(replicas: Mapping[str, Program], folder: Path) -> Iterator[str]:
    """Run nginx, and return its address."""
    assert NGINX is not None
    port = free_port()
    changes = {f"{name}:8787": f"127.0.0.1:{replica.port}" for name, replica in replicas.items()}
    changes |= {"listen 8787": f"listen 127.0.0.1:{port}", "/tmp/": f"{folder}/"}  # noqa: S108
    version = subprocess.run([NGINX, "-v"], capture_output=True, text=True, check=True).stderr
    if [int(part) for part in re.findall(r"\d+", version)[:3]] < [1, 27, 3]:
        changes[" resolve "] = " "  # this version doesn't have it, and addresses need none
    config = folder / "nginx.conf"
    config.write_text(replaced((DEPLOY / "nginx" / "nginx.conf").read_text(), changes))
    # In the image it runs as another user. That user couldn't read the test's folder.
    own = "daemon off;" if os.getuid() else "daemon off; user root;"
    with running(NGINX, "-p", str(folder), "-c", str(config), "-g", own, log=folder / "nginx.log"):
        url = f"http://127.0.0.1:{port}"
        assert until(lambda: _serves(f"{url}/livez")), (folder / "nginx.log").read_text()
        yield url


@contextlib.contextmanager
def prometheus(targets: Mapping[str, int], folder: Path) -> Iterator[str]:
    """Run Prometheus, and return its address."""
    assert PROMETHEUS is not None
    port = free_port()
    config, data = folder / "prometheus.yml", folder / "prometheus"
    changes = {f"{name}:9090": f"127.0.0.1:{target}" for name, target in targets.items()}
    changes |= {"/etc/prometheus/alerts.yaml": str(ALERTS), "15s": "1s"}
    config.write_text(replaced((DEPLOY / "prometheus" / "prometheus.yml").read_text(), changes))
    options = [f"--config.file={config}", f"--storage.tsdb.path={data}", f"--web.listen-address=127.0.0.1:{port}"]
    with running(PROMETHEUS, *options, log=folder / "prometheus.log"):
        url = f"http://127.0.0.1:{port}"
        assert until(lambda: _serves(f"{url}/-/ready")), (folder / "prometheus.log").read_text()
        yield url


def _serves(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False).status_code == 200
    return False


def found(prometheus: str, path: str, **query: str) -> Any:
    """The data of a response of Prometheus' API."""
    answer = httpx.get(f"{prometheus}/api/v1/{path}", params=query, trust_env=False).json()
    assert answer["status"] == "success", answer
    return answer["data"]


def values(prometheus: str, expression: str) -> list[float]:
    return [float(one["value"][1]) for one in found(prometheus, "query", query=expression)["result"]]


@pytest.mark.long
def test_the_stack_of_the_compose_file_serves_and_is_monitored(tmp_path: Path) -> None:
    upstream = StandIn(window=8_192)
    with contextlib.ExitStack() as stack:
        _, *options = (interpolated(option) for option in services()["valkey"]["command"])
        valkey = stack.enter_context(redis_server(tmp_path / "valkey", options, password=SECRETS["VALKEY_PASSWORD"]))
        address = stack.enter_context(serve(upstream.app))
        ports = {name: free_port() for name in proxies()}
        replicas = {
            name: stack.enter_context(replica(name, f"127.0.0.1:{valkey.port}", address, ports[name], tmp_path))
            for name in proxies()
        }
        url = stack.enter_context(load_balancer(replicas, tmp_path))
        monitoring = stack.enter_context(prometheus(ports, tmp_path))
        openai = stack.enter_context(client(url, KEY))

        def summary() -> str | None:
            raw = openai.chat.completions.with_raw_response.create(model="gpt-4", messages=chat(20, 300))
            return raw.headers.get("x-compaction-summary")

        assert summary() == "made"
        calls = len(upstream.summaries)
        assert [summary() for _ in range(3)] == ["stored"] * 3
        assert len(upstream.summaries) == calls
        assert upstream.requests[-1].headers["authorization"] == "Bearer sk-upstream"
        stream = openai.chat.completions.create(model="gpt-4", messages=chat(1, 10), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

        up = "up == 1 and on (instance) compaction_requests_total"
        assert until(lambda: len(values(monitoring, up)) == 2), values(monitoring, up)
        _check_monitoring(monitoring)

        # The load balancer tries the other replica.
        replicas["proxy-1"].process.terminate()
        assert until(replicas["proxy-1"].refuses)
        assert [summary() for _ in range(3)] == ["stored"] * 3


def _check_monitoring(monitoring: str) -> None:
    """Each alert rule and each expression of the dashboard is valid, and the autoscaler's metric is there."""
    assert values(monitoring, "compaction_requests_in_flight") == [0, 0]
    (group,) = found(monitoring, "rules")["groups"]
    (written,) = in_yaml(ALERTS)["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in written["rules"]]
    # CompactionProxyDown is pending until the first scrape.
    states = {("ok", "inactive")}
    assert until(lambda: {(rule["health"], rule["state"]) for rule in _rules(monitoring)} == states), _rules(monitoring)
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            found(monitoring, "query", query=re.sub(r"\$\w+", _variable, target["expr"]))


def _rules(monitoring: str) -> list[dict[str, Any]]:
    return [rule for group in found(monitoring, "rules")["groups"] for rule in group["rules"]]


def _variable(name: re.Match[str]) -> str:
    return "1m" if name[0] == "$__rate_interval" else ".*"
