"""LiteLLM's table of models and tokenizers may move or break: nothing starts without them, and no request fails."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from proxy.limits import tables
from proxy.pipeline import runtime
from proxy.tokens import text as encodings
from tests.conftest import proxies
from tests.kit.client import JSON, ask, chat
from tests.kit.raw_upstream import Stage, answer

ROOT = Path(__file__).parents[2]
TOKENIZERS = Path("litellm_core_utils") / "tokenizers"
ANSWER = b'{"choices":[{"message":{"role":"assistant","content":"Hi"},"finish_reason":"stop"}]}'


def installed() -> Path:
    spec = importlib.util.find_spec("litellm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.mark.parametrize(
    ("kept", "missing"),
    [
        ([], tables.TABLE),
        ([tables.TABLE], "tokenizer 'cl100k_base'"),
        ([TOKENIZERS], tables.TABLE),
    ],
    ids=["nothing", "no tokenizers", "no table"],
)
def test_it_does_not_start_without_them(tmp_path: Path, kept: list[str | Path], missing: str) -> None:
    package = tmp_path / "litellm"
    for path in kept:
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).symlink_to(installed() / path)
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, "-P", "-m", "proxy", "serve", "--port", "0"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert missing in ended.stderr
    assert "Fix: install the dependencies again" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "state").exists()


class Broken:
    """Takes files away in this process, and puts them back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch, self._folder = monkeypatch, folder

    def table(self) -> None:
        self._patch.setattr(tables, "table", lambda: None)

    def unreadable_table(self) -> None:
        (self._folder / tables.TABLE).write_bytes(b'{"a": "\xff"}')
        self._patch.setattr(tables, "table_path", lambda: self._folder / tables.TABLE)

    def tokenizers(self) -> None:
        self._patch.setattr(encodings, "tokenizers", lambda: self._folder)

    def damaged_tokenizers(self) -> None:
        for file in encodings.FILES.values():
            (self._folder / file.name).write_bytes(b"damaged")
        self.tokenizers()

    def mend(self) -> None:
        self._patch.undo()


@pytest.mark.parametrize(
    "take",
    [Broken.table, Broken.unreadable_table, Broken.tokenizers, Broken.damaged_tokenizers],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("size", [1, 40_000], ids=["small", "large"])
def test_requests_pass_through_without_them(
    stage: Stage, tmp_path: Path, take: Callable[[Broken], None], size: int
) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.MonkeyPatch.context() as unloaded,
        stage(lambda _: [answer(ANSWER)]) as upstream,
        proxies(lambda: tmp_path) as start_proxy,
        structlog.testing.capture_logs() as logs,
    ):
        unloaded.setattr(encodings, "_loaded", {})
        unloaded.setattr(runtime, "RETRY_SECONDS", 0.0)
        broken = Broken(patch, tmp_path)
        take(broken)
        url = start_proxy(upstream.url, {"policies": {"default": {"trigger": {"tokens": 4_000}, "mode": "enforce"}}})
        assert ask(url, "/readyz", None).body == b"ready\n"
        counted = size > 1 or take is not Broken.damaged_tokenizers
        body = chat("word " * size, max_tokens=100)
        for _ in range(3):
            got = ask(url, body=body, headers=[JSON, ("authorization", "Bearer sk-own")])
            assert (got.status, got.body) == (200, ANSWER)
            assert got.header("x-compaction") == ("failed" if counted else "none")
            assert upstream.last.body == body
        ready = ask(url, "/readyz", None)
        assert ready.status == 200
        assert (b"Requests pass through uncompacted: " in ready.body) is counted
        assert [line["event"] for line in logs].count("counting.unavailable") == counted
        broken.mend()
        got = ask(url, body=body, headers=[JSON, ("authorization", "Bearer sk-own")])
        assert (got.status, got.header("x-compaction") == "failed") == (200, False)
        assert ask(url, "/readyz", None).body == b"ready\n"
