"""Test the settings of valid files."""

from pathlib import Path
from textwrap import dedent

import pytest

from proxy.config import Route, Settings, load
from tests.kit.configurations import loads


def settings(text: str, **environ: str) -> Settings:
    return loads(dedent(text).encode(), environ)


@pytest.mark.parametrize("content", [None, "", "# nothing\n", "---\n", "\ufeff# a mark\n", "{}"])
def test_without_settings_every_model_goes_to_openai_with_the_callers_key(
    content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:8787/v1")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:8787")
    environ = {"OPENAI_BASE_URL": "http://127.0.0.1:8787/v1", "OPENAI_API_KEY": "sk-not-ours"}
    found = load(None, environ) if content is None else loads(content.encode(), environ)
    assert (found.server.host, found.server.port) == ("127.0.0.1", 8787)
    assert found.server.body_limit == 64_000_000
    assert (found.server.deadline, found.server.drain) == (600, 30)
    assert list(found.upstreams) == ["openai", "anthropic"]
    claude = found.upstreams["anthropic"]
    assert (claude.provider, claude.base_url) == ("anthropic", "https://api.anthropic.com/v1")
    assert claude.api_key is None
    upstream = found.upstreams["openai"]
    assert (upstream.provider, upstream.base_url) == ("openai", "https://api.openai.com/v1")
    assert upstream.api_key is None
    assert found.route("any/model") == Route("openai", "any/model", None)
    assert found.policies["default"] == Settings().policies["default"]


def test_the_default_store_is_in_the_users_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = load(None, {}).store.path
    assert path is not None
    assert path.name == "compaction.db"
    assert path.parent.name == "compaction-proxy"
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///a/b.db", Path("a/b.db")),
        ("sqlite:////var/lib/b.db", Path("/var/lib/b.db")),
        ("sqlite://", None),
    ],
)
def test_the_store(url: str, path: Path | None) -> None:
    assert settings(f"store: {{url: '{url}'}}").store.path == path


@pytest.mark.parametrize(
    ("written", "size"),
    [("100", 100), ("64MB", 64_000_000), ("1 GB", 10**9), ("2mib", 2 * 1024**2), ("'7'", 7), ("5kB", 5000), ("9b", 9)],
)
def test_sizes(written: str, size: int) -> None:
    assert settings(f"server: {{body_limit: {written}}}").server.body_limit == size


def test_routes_match_in_order_and_by_case() -> None:
    found = settings("""
        upstreams: {a: {}, b: {}}
        models:
          - {match: "gpt-4o", upstream: b, model: x}
          - {match: "gpt-*", upstream: a}
          - {match: "[ab]?", upstream: b}
    """)
    assert found.route("gpt-4o") == Route("b", "x", None)
    assert found.route("gpt-4o-mini") == Route("a", "gpt-4o-mini", None)
    assert found.route("a1") == Route("b", "a1", None)
    assert found.route("GPT-4o") is None


@pytest.mark.parametrize(
    ("upstream", "base_url"),
    [
        ("{}", "https://api.openai.com/v1"),
        ("{base_url: null}", "https://api.openai.com/v1"),
        ("{provider: anthropic}", "https://api.anthropic.com/v1"),
        ("{provider: gemini}", None),
        ("{provider: groq, base_url: 'http://127.0.0.1:8000/v1/'}", "http://127.0.0.1:8000/v1"),
        ("{base_url: 'http://[::1]:8000'}", "http://[::1]:8000"),
    ],
)
def test_the_address_of_an_upstream(upstream: str, base_url: str | None) -> None:
    assert settings(f"upstreams: {{main: {upstream}}}").upstreams["main"].base_url == base_url


def test_providers_with_credentials_of_their_own_need_no_key_where_callers_have_the_proxys() -> None:
    found = settings(f"""
        auth: {{mode: keys}}
        teams: {{a: {{keys: ["sha256:{"0" * 64}"]}}}}
        upstreams: {{main: {{provider: bedrock}}}}
    """)
    assert found.upstreams["main"].has_credential


def test_secrets_are_not_in_any_representation() -> None:
    text = "upstreams: {main: {api_key: sk-canary, headers: {x-key: sk-canary}}}"
    found = settings(text)
    assert found.upstreams["main"].headers["x-key"].get_secret_value() == "sk-canary"
    assert "sk-canary" not in f"{found} {found!r} {found.model_dump()} {found.model_dump_json()}"
