"""A team that may use some models, or some paths, can't reach others by another spelling."""

import hashlib
import json
from typing import Any

import pytest

from proxy.config.document import Issues
from tests.kit.client import CHAT, JSON, StartProxy, ask
from tests.kit.configurations import loads
from tests.kit.raw_upstream import RawUpstream

KEY = ("x-api-key", "sk-a")


def restricted(**team: Any) -> dict[str, Any]:
    return {
        "auth": {"mode": "keys"},
        "upstreams": {"main": {"api_key": "sk-operators"}},
        "teams": {"a": {"keys": [f"sha256:{hashlib.sha256(b'sk-a').hexdigest()}"], **team}},
    }


@pytest.fixture(scope="module")
def cheap(start_proxy: StartProxy, upstream: RawUpstream) -> str:
    return start_proxy(upstream.url, restricted(models=["cheap*"]))


ADVISOR = b'[{"type":"advisor","model":"dear"}]'
CHOICES = [
    b'"input":[{"type":"additional_tools","role":"developer","tools":%b}]' % ADVISOR,
    b'"input":[{"type":"additional_tools","tools":[],"Tools":%b}]' % ADVISOR,
    b'"input":[{"\xff":1,"type":"additional_tools","tools":%b}]' % ADVISOR,
    b'"messages":[{"role":"developer","content":[{"type":"additional_tools","to\\u006fls":%b}]}]' % ADVISOR,
    b'"tools":[{"type":"namespace","name":"n","tools":%b}]' % ADVISOR,
    b'"tools":[{"type":"openrouter:advisor","parameters":{"model":"dear"}}]',
    b'"tools":[{"type":"openrouter:fusion","parameters":{"analysis_models":["cheap","dear"]}}]',
    b'"tools":[{"type":"advisor","model":{"id":"dear"}}]',
    b'"tools":[{"type":"advisor","config":{"a":[{"model_name":"dear","model_name":"cheap"}]}}]',
    b'"plugins":[{"id":"fusion","model":"dear"}]',
    b'"plugins":[{"id":"auto-router","allowed_models":["dear/*"]}]',
    b'"extra_body":{"model":"dear"}',
    b'"extra_body":{"route":"fallback"}',
    b'"extra_body":{"extra_body":{"model":"dear"}}',
    b'"reasoning":{"fallback":"dear"}',
    b'"provider":{"order":["dear"]}',
    b'"provider":{"zdr":true,"allow_fallbacks":true}',
    b'"provider":"dear"',
    b'"providerOptions":{"gateway":{"models":["dear"]}}',
    b'"route":"fallback"',
    b'"api_base":"http://dear.test"',
    b'"tensorzero::variant_name":"dear"',
    b'"mod\\u0065l_list":["dear"]',
    b'"x":' + b"[" * 100_000 + b"]" * 100_000,
]
"""Fields by which some server would choose another model or provider than `model`."""

REFUSED = [
    b'{"model":"cheap,dear"}',
    b'{"model":"cheap@preset/dear"}',
    b'{"model":"cheap","tools":[' + b",".join([b"{}"] * 1_001) + b"]}",
    b'{"model":"cheap","tools":[{' + b",".join(b'"a%d":1' % number for number in range(1_001)) + b"}]}",
    b'{"model":"cheap",' + b",".join(b'"a%d":1' % number for number in range(1_000)) + b"}",
    b'{"model":"dear","input":"' + b"a" * 100_000 + b'"}',
    b'{"model":"dear"}',
    b'{"model":["cheap"]}',
    b'{"input":"x"}',
    b"",
    b"no JSON",
    b'["cheap"]',
    b'{"model":"dear","model":"cheap"}',
    b'{"model":"cheap","mod\\u0065l":"dear"}',
    b'{"model":"cheap","Model":"dear"}',
    b'{"model":"cheap","MODEL ":"dear"}',
    b'{"model":"cheap","model\\u0000":"dear"}',
    b'{"model":"cheap","models":["dear"]}',
    b'{"model":"cheap","model\xc5\xbf":["dear"]}',
    b'{"model":"cheap","fallback_models":["dear"]}',
    b'{"model":"cheap","fallbacks":["dear"]}',
    b'{"model":"cheap","deployment_id":"dear"}',
    b'{"model":"cheap","engine":"dear"}',
    b'{"model":"cheap","tools":[{"type":"advisor","name":"a","model":"dear"}]}',
    b'{"model":"cheap","tools":[{"type":"advisor","name":"a","model":"dear"}],"tools":[]}',
    b'{"model":"cheap","Tools":[{"type":"advisor","name":"a","model":"dear"}]}',
    b'{"model":"cheap","x":1}{"model":"dear"}',
    *(b'{"model":"cheap",%b}' % fields for fields in CHOICES),
    b'{"model":"cheap",' + b",".join(b'"a%d":1' % i for i in range(1_001)) + b"}",
    b'{"a":' * 20_000,
    '{"model":"dear","model":"cheap"}'.encode("utf-16"),
    b'{"model":"cheap","x":NaN,"Model":"dear"}',
    b'{"model":"dear","x":"\n","model":"cheap"}',
]


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/messages", "/openai/v1/responses/"])
def test_every_reader_finds_an_allowed_model(cheap: str, upstream: RawUpstream, path: str) -> None:
    before = len(upstream.arrived)
    conversation = path == CHAT or path.strip("/").endswith(("v1/responses", "v1/messages"))
    for body in REFUSED:
        got = ask(cheap, path, body, [JSON, KEY])
        assert got.status in ((400, 403, 404) if conversation else (403,)), body
        if path in (CHAT, "/v1/embeddings"):
            assert got.error["type"] in ("permission_error", "invalid_request_error")
    assert len(upstream.arrived) == before


@pytest.mark.parametrize(
    "body",
    [
        b'{"input":"x", "model":"cheap-1","x":1.10,"y":[1e400,"\\ud83d"]}',
        b'{"model":"cheap","messages":[],"modalities":["text"],"metadata":{"model":"dear"},"tools":[{"type":"function"}]}',
        b'{"model":"cheap","tools":[{"type":"advisor","name":"a","model":"cheap-2"}]}',
        b'{"model":"cheap","tools":[' + b",".join([b'{"description":"' + b"a" * 100 + b'"}'] * 1_000) + b"]}",
        b'{"model":"cheap","messages":[{"role":"assistant","model":"dear","content":[{"type":"tool_use","input":'
        b'{"model":"dear","tools":[{"model":"dear"}]}}]},{"role":"user","content":"x","tools":[{"name":"model"}]}]}',
        b'{"model":"cheap","tools":[{"name":"task","input_schema":{"type":"object","properties":{"model":{"type":"string",'
        b'"default":"dear"},"fallbacks":{"enum":["dear"]}},"required":["model"]},"input_examples":[{"model":"dear"}]}]}',
        b'{"model":"cheap","provider":{"data_collection":"deny","zdr":true},"plugins":[{"id":"web","engine":"exa"}],'
        b'"transforms":[],"extra_body":{"google":{"thinking_config":{}},"model":"cheap"}}',
        b'{"model":"cheap","logit_bias":{' + b",".join(b'"%d":1' % number for number in range(1_100)) + b"}}",
    ],
    ids=["numbers", "chat", "tool", "1,000 tools", "conversation", "schema", "gateway", "many biases"],
)
def test_an_allowed_request_travels_unchanged(cheap: str, upstream: RawUpstream, body: bytes) -> None:
    for path in (CHAT, "/v1/embeddings"):
        assert ask(cheap, path, body, [JSON, KEY]).status == 200
        assert upstream.last.body == body


GATEWAYS = [
    ("x-portkey-config", '{"targets":[{"override_params":{"model":"dear"}}]}'),
    ("X-Portkey-Provider", "dear"),
    ("x_portkey_virtual_key", "dear"),
    ("helicone-fallbacks", "[]"),
    ("helicone-model-override", "dear"),
    ("helicone-target-url", "http://dear.test"),
    ("azureml-model-deployment", "dear"),
    ("x-ai-eg-model", "dear"),
    ("x-gateway-destination-endpoint", "dear"),
    ("x-litellm-tags", "dear"),
]


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/models"])
def test_headers_that_choose_a_model_or_provider_are_left_out(cheap: str, upstream: RawUpstream, path: str) -> None:
    kept = [("helicone-auth", "a"), ("x-portkey-trace-id", "b"), ("anthropic-beta", "c"), ("openai-project", "d")]
    body = None if path == "/v1/models" else b'{"model":"cheap","input":"x"}'
    for _ in range(3):  # later requests may take a shorter way
        assert ask(cheap, path, body, [JSON, KEY, *GATEWAYS, *kept]).status == 200
        names = {name.lower().replace("_", "-") for name, _ in upstream.last.headers}
        assert names >= {name for name, _ in kept}
        assert not names & {name.lower().replace("_", "-") for name, _ in GATEWAYS}


OTHER_PATHS = [
    ("POST", "/v1/engines/dear/completions", b'{"model":"cheap"}'),
    ("POST", "/v1/batches", b'{"model":"cheap"}'),
    ("POST", "/v1/messages/batches", b'{"model":"cheap"}'),
    ("POST", "/v1/responses/resp_1/cancel", b'{"model":"cheap"}'),
    ("PUT", "/v1/embeddings", b'{"model":"cheap"}'),
    ("DELETE", "/v1/models/ft:cheap", None),
    ("DELETE", "/v1/models/cheap", None),
    ("GET", "/v1/models/dear", None),
    ("GET", "/v1/models/cheap/../dear", None),
    ("GET", "/v1/files", None),
    ("GET", "/v1/chat/completions", None),
    ("GET", "/v1/responses/resp_1", None),
    ("POST", "/openai/deployments/dear/embeddings", b'{"model":"cheap"}'),
    ("POST", "/openai/deployments/dear/chat/completions", b'{"model":"cheap","messages":[]}'),
    ("POST", "/v1/embeddings?model=dear", b'{"model":"cheap"}'),
    ("POST", "/v1/embeddings?a=b;model=dear", b'{"model":"cheap"}'),
    ("POST", "/v1/embeddings?provider=dear", b'{"model":"cheap"}'),
    ("POST", "/v1/embeddings?%4dodel=dear", b'{"model":"cheap"}'),
    ("POST", "/v1/embeddings%2Fx", b'{"model":"cheap"}'),
    (
        "POST",
        "/v1/audio/transcriptions",
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ncheap\r\n--x--\r\n',
    ),
]


@pytest.mark.parametrize(("method", "path", "body"), OTHER_PATHS)
def test_no_other_path_gets_around_the_list(
    cheap: str, upstream: RawUpstream, method: str, path: str, body: bytes | None
) -> None:
    before = len(upstream.arrived)
    kind = JSON if body is None or body.startswith(b"{") else ("content-type", "multipart/form-data; boundary=x")
    got = ask(cheap, path, body, [kind, KEY], method)
    assert got.status == (404 if ".." in path else 403)
    assert len(upstream.arrived) == before


def test_the_models_of_the_list_can_be_looked_up(cheap: str, upstream: RawUpstream) -> None:
    assert ask(cheap, "/v1/models/cheap-1", None, [KEY]).status == 200
    assert upstream.last.target == "/v1/models/cheap-1"


@pytest.mark.parametrize(
    ("paths", "statuses"),
    [(None, (200, 200, 200)), ("all", (200, 200, 200)), ("models", (200, 200, 403)), ("chat", (200, 403, 403))],
)
def test_the_paths_of_a_team(
    start_proxy: StartProxy, upstream: RawUpstream, paths: str | None, statuses: tuple[int, ...]
) -> None:
    url = start_proxy(upstream.url, restricted(**({} if paths is None else {"paths": paths})))
    got = [
        ask(url, path, body, [JSON, KEY])
        for path, body in ((CHAT, b'{"model":"m"}'), ("/v1/embeddings", b'{"model":"m"}'), ("/v1/files", None))
    ]
    assert tuple(answer.status for answer in got) == statuses
    assert ask(url, "/v1/models", None, [KEY]).status == 200
    refused = [json.loads(answer.body)["error"]["code"] for answer in got if answer.status == 403]
    assert set(refused) <= {"path_not_allowed"}


def test_a_list_of_models_can_not_be_combined_with_all_paths() -> None:
    with pytest.raises(Issues) as caught:
        loads(b"teams: {a: {models: [cheap], paths: all}}", {})
    assert "can't be all for a team with models" in str(caught.value.issues[0])
