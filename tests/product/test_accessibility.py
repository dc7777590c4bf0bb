"""WCAG 2.2 AA of every page by axe-core in a real browser, in two widths and schemes, with and without requests."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.scripted import behind, chat, key_hash
from tests.kit.upstream import StandIn
from tests.kit.waiting import until
from tests.product.browser import CHROMIUM, DRIVER, MISSING, browser

AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core/axe.min.js"))
"""The script of axe-core. It isn't a dependency, because only this test needs it."""

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING),
    pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: npm install --no-save axe-core@4.14.1"),
]

TAGS = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
SIGN_IN = "await fetch('/compaction/sign-in', {method: 'POST', body: new URLSearchParams({key: 'cp-admin'})});"
UNFOLD = "document.querySelectorAll('details').forEach(one => one.open = true);"
CHECK = """
    const found = await axe.run(document, {runOnly: given[0]});
    const faults = found.violations.map(one => `${one.id}: ${one.nodes[0].html.slice(0, 200)}`);
    if (document.documentElement.scrollWidth > innerWidth) faults.push("scrolls sideways");
    return [innerWidth, found.passes.some(one => one.id === "color-contrast"), faults];
"""


@pytest.fixture(params=[300, 0])
def requested(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A proxy, and the records of its requests: compacted, small, unchanged, and refused ones."""
    settings = {
        "auth": {"mode": "keys"},
        "admin": {"keys": [key_hash("cp-admin")]},
        "teams": {"red": {"keys": [key_hash("cp-red")]}, "blue": {"keys": [key_hash("cp-blue")], "policy": "quiet"}},
        "policies": {"default": {}, "quiet": {"mode": "shadow"}},
    }
    with behind(StandIn(window=16_000), tmp_path, **settings) as url, httpx.Client(trust_env=False) as http:
        for number in range(request.param):
            key = "cp-nobody" if number % 50 == 7 else "cp-red" if number % 3 else "cp-blue"
            body = {"model": f"gpt-5-{number % 4}", "messages": chat(30 if number % 60 < 3 else 1, 400)}
            http.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
        http.headers["authorization"] = "Bearer cp-admin"
        records = lambda: http.get(f"{url}/compaction/requests?limit=1000").json()["data"]  # noqa: E731
        assert until(lambda: len(records()) == request.param)
        yield url, records()


def test_every_page_meets_wcag_aa(requested: tuple[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    url, records = requested
    views = {(one["verdict"], one["status"]): f"view/{one['id']}" for one in records}
    assert len(views) >= 4 or not records
    talks = [f"conversation/{one['conversation']}" for one in records if one["conversation"]]
    paths = ["", "savings", "?status=odd", "view/unknown", "sign-in", *views.values(), *talks[:1]]
    port = url.rsplit(":", 1)[1]
    with browser(tmp_path / "profile", f"MAP 127.0.0.1:{port} 127.0.0.1:{port}") as window:
        window.open(f"{url}/compaction/")
        window.run(SIGN_IN)
        for width, scheme, path in itertools.product((1280, 390), ("light", "dark"), paths):
            window.size(width)
            window.scheme(scheme)
            window.open(f"{url}/compaction/{path}")
            window.run(AXE.read_text())
            for unfold in ("", UNFOLD):
                assert window.run(unfold + CHECK, TAGS) == [width, True, []], (path, scheme)
