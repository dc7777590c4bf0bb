"""Check the line that a server writes at its start."""

from pathlib import Path

from structlog.testing import capture_logs

from proxy.config import Loaded, read
from proxy.server.run import log_start


def loaded(folder: Path, key: str, window: int) -> Loaded:
    file = folder / "config.yaml"
    file.write_text(
        f"store: {{url: 'sqlite:///{folder}/store.db'}}\n"
        f"upstreams: {{main: {{base_url: 'https://llm.example:8443/v1', api_key: {key}}}}}\n"
        f"models: [{{match: '*', upstream: main, profile: {{context_window: {window}}}}}]\n"
    )
    return read(file, {})


def test_the_line_has_hosts_and_no_keys(tmp_path: Path) -> None:
    first = loaded(tmp_path, "sk-canary", 9_000)
    with capture_logs() as logs:
        log_start(first.settings, first, "127.0.0.1:1", 2, 3)
    (line,) = logs
    assert line["upstreams"] == {"main": "llm.example:8443"}
    assert line["policies"] == {"enforce": 1}
    assert (line["workers"], line["warnings"], line["teams"]) == (2, 3, 0)
    assert "sk-canary" not in repr(line)
