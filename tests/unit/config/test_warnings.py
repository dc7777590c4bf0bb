"""Test the warnings about the address that the proxy listens on."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.cli.commands import main

OPEN = "upstreams: {main: {api_key: x}}\nstore: {url: 'sqlite:///s.db'}\n"


EXPOSED = [
    (OPEN, "0.0.0.0", ["auth.mode: anyone who can reach 0.0.0.0 can spend", "store.encryption.key: "]),  # noqa: S104
    (OPEN + "server: {host: '::'}\n", None, ["auth.mode: ", "store.encryption.key: "]),
    (OPEN, None, []),
    (OPEN, "::1", []),
    ("store: {url: 'sqlite://'}\n", "0.0.0.0", []),  # noqa: S104
]


@pytest.mark.parametrize(("text", "host", "expected"), EXPOSED)
def test_listening_on_more_than_loopback_is_warned_of(
    text: str, host: str | None, expected: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    options = ["check", str(file), *(["--host", host] if host else [])]
    plain = CliRunner().invoke(main, options)
    assert plain.exit_code == 0
    said = [line for line in plain.stderr.splitlines() if "warning: " in line]
    assert len(said) == len(expected)
    for line, start in zip(said, expected, strict=True):
        assert line.partition("warning: ")[2].startswith(start)
    assert CliRunner().invoke(main, [*options, "--strict"]).exit_code == (1 if expected else 0)
