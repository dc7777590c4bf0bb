"""The recipes for providers and clients: complete, short, listed, and consistent with the configuration loader."""

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest

from proxy.config import Settings
from proxy.config.loading import read

DOCS = Path(__file__).parents[2] / "docs"
MOST_LINES = 40
PROVIDERS = sorted(path for path in (DOCS / "providers").glob("*.md") if path.name != "README.md")
CLIENTS = sorted(path for path in (DOCS / "clients").glob("*.md") if path.name != "README.md")
LISTS = [DOCS / "providers" / "README.md", DOCS / "clients" / "README.md"]
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)")


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


provider_pages = pytest.mark.parametrize("page", PROVIDERS, ids=named)
client_pages = pytest.mark.parametrize("page", CLIENTS, ids=named)
all_pages = pytest.mark.parametrize("page", [*PROVIDERS, *CLIENTS, *LISTS], ids=named)


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def outside_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_the_expected_recipes_exist() -> None:
    assert len(PROVIDERS) >= 12
    assert len(CLIENTS) >= 12


@all_pages
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("index", LISTS, ids=named)
def test_every_page_is_listed_once(index: Path) -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", index.read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in index.parent.glob("*.md") if path != index)


def configuration(page: Path, folder: Path) -> tuple[str, Settings, tuple[str, ...]]:
    """Return the configuration of a page, the settings it loads as, and its warnings."""
    (text,) = blocks(page, "yaml")
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    loaded = read(file, dict.fromkeys(VARIABLE.findall(text), "placeholder"))
    return text, loaded.settings, loaded.warnings


@provider_pages
def test_a_provider_has_one_complete_configuration_without_warnings(page: Path, tmp_path: Path) -> None:
    text, settings, warnings = configuration(page, tmp_path)
    assert {"upstreams", "models"} <= settings.model_fields_set
    assert warnings == ()
    assert "profile" in text or all(set("*?[") & set(route.match) or route.model for route in settings.models)


@provider_pages
def test_a_provider_names_the_variables_of_its_configuration(page: Path) -> None:
    (text,) = blocks(page, "yaml")
    assert [name for name in VARIABLE.findall(text) if name not in outside_blocks(page)] == []


@provider_pages
def test_a_provider_has_one_request_for_a_model_that_its_configuration_routes(page: Path, tmp_path: Path) -> None:
    _, settings, _ = configuration(page, tmp_path)
    (line,) = re.findall(r"^ {4}curl .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert f"127.0.0.1:{settings.server.port}/v1/chat/completions" in line
    body = json.loads(re.findall(r"-d '(.*)'", line)[0])
    assert settings.route(body["model"]) is not None
    assert body["messages"]
    keyed = all(upstream.has_credential for upstream in settings.upstreams.values())
    local = all("127.0.0.1" in (upstream.base_url or "") for upstream in settings.upstreams.values())
    assert keyed or local or "authorization: Bearer $" in line


@client_pages
def test_a_client_page_says_which_api_it_uses_and_how_to_check(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "chat completions" in text.lower() or "chat.completions" in text
    assert "compact" in outside_blocks(page)
    assert "x-compaction" in text
    assert f"http://127.0.0.1:{Settings().server.port}" in text


@client_pages
def test_the_code_of_a_client_page_parses(page: Path) -> None:
    for code in blocks(page, "python"):
        ast.parse(code)
    for code in blocks(page, "json"):
        json.loads(code)
    for code in blocks(page, "toml"):
        tomllib.loads(code)


@client_pages
def test_a_base_url_ends_in_the_version_except_for_anthropics_clients(page: Path) -> None:
    addresses = set(re.findall(r"http://127\.0\.0\.1:\d+([/\w]*)", page.read_text(encoding="utf-8")))
    expected = {""} if page.stem == "claude-code" else {"/v1", ""}
    assert addresses - {"/metrics"} <= expected
