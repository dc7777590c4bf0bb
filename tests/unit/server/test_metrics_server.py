"""Test the separate address of the metrics."""

from pathlib import Path

import httpx
import pytest

from proxy.config import read
from proxy.config.settings import Settings
from proxy.errors import ConfigurationError
from proxy.server.app import Proxy
from proxy.server.run import serve_metrics
from tests.kit.program import free_port


def test_metrics_are_served_on_their_own_address(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    file = tmp_path / "config.yaml"
    file.write_text(f"metrics:\n  listen: {address}\nstore: {{url: sqlite://}}\n")
    loaded = read(file, {})
    serve_metrics(loaded.settings, loaded)
    assert "compaction_requests_total" in httpx.get(f"http://{address}/metrics", trust_env=False).text
    assert "/metrics" not in [getattr(route, "path", None) for route in Proxy(loaded.settings).routes]
    with pytest.raises(ConfigurationError) as caught:  # the port is in use now
        serve_metrics(loaded.settings, loaded)
    assert caught.value.message.startswith(f"{file}:2: metrics.listen: cannot listen on {address} (address")
    assert "Fix: " in caught.value.message
    serve_metrics(Settings(), None)


@pytest.mark.parametrize("listen", ["9090", '"9090"', "localhost", "127.0.0.1:0", "127.0.0.1:70000", ":9090", "a b:1"])
def test_other_addresses_name_the_line(listen: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"metrics:\n  listen: {listen}\n")
    with pytest.raises(ConfigurationError) as caught:
        read(file, {})
    assert f"{file}:2: metrics.listen: must be an address and a port" in caught.value.message
    assert "Fix: listen: 127.0.0.1:9090" in caught.value.message
