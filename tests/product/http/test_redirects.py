"""The proxy follows no redirect. One to the upstream itself leads to the proxy, and hides the upstream's address."""

import pytest

from tests.kit.client import CHAT, StartProxy, ask, chat
from tests.kit.raw_upstream import Arrived, Stage, Step, head


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ("{up}/v1/models?x=1#y", "/v1/models?x=1#y"),
        ("/v1/files/2", "/v1/files/2"),
        ("2/content", "/v1/files/2/content"),
        ("{up}/v1", "/v1"),
        ("https://storage.test/v1/blob?sig=1", "https://storage.test/v1/blob?sig=1"),
        # Addresses of the upstream's host that the proxy doesn't serve.
        ("{up}/admin", None),
        ("{up}/v1x/models", None),
        ("/login", None),
        ("https://127.0.0.1/v1/models", None),
        ("http://[bad", None),
    ],
)
@pytest.mark.parametrize("name", ["Location", "Content-Location"])
def test_an_address_of_the_upstream_becomes_the_proxys(
    start_proxy: StartProxy, stage: Stage, sent: str, received: str | None, name: str
) -> None:
    def script(arrived: Arrived) -> list[Step]:
        value = sent.replace("{up}", f"http://{arrived.header('host')}")
        return [head("307 Temporary Redirect", [(name, value), ("Content-Length", "0")])]

    with stage(script) as upstream:
        url = start_proxy(upstream.url, {"upstreams": {"main": {"api_key": "sk-operators"}}})
        for path, body in (("/v1/files/1", None), *([(CHAT, chat())] if sent != "2/content" else [])):
            got = ask(url, path, body)
            assert (got.status, got.header(name.lower())) == (307, received)
