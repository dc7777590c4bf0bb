"""The examples of ``docs/library.md`` run against a stand-in of OpenAI."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from proxy.server.loopback import serve
from tests.kit.upstream import EveryApi, Reply

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
PACKAGES = {"openai": "openai", "langchain": "langchain", "agents": "openai-agents"}


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[EveryApi]:
    model = EveryApi(responder=lambda body: Reply(content="One, two, three."))
    with serve(model.app) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        yield model


def test_each_example_is_tried() -> None:
    assert len(EXAMPLES) == len(PACKAGES)


@pytest.mark.parametrize(("code", "module"), list(zip(EXAMPLES, PACKAGES, strict=True)), ids=list(PACKAGES))
def test_an_example_runs(code: str, module: str, upstream: EveryApi) -> None:
    if find_spec(module) is None:
        pytest.skip(f"no {module}; pip install {PACKAGES[module]} langchain-openai")
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102 - the page is ours
    names["compaction"].close()
    assert "three" in str(names["answer"])
