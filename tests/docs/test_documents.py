"""Check the documents' settings, commands, headers, links, and configurations, and the Dockerfile."""

import asyncio
import os
import re
from pathlib import Path
from typing import get_args
from xml.parsers import expat

import click
import httpx
import pytest
from click.testing import CliRunner

from proxy import __version__
from proxy.access.admin import LINK_PATH
from proxy.cli.commands import main
from proxy.compaction import fit, keeps, render
from proxy.compaction.stages import NAMES
from proxy.config import Settings, policy
from proxy.demo.run import ROWS, WINDOW
from proxy.endpoints.records import DIFF, PARAMETERS, REQUEST
from proxy.http.headers import Own
from proxy.limits.learned import GUESS_SECONDS, NAMED_SECONDS
from proxy.pipeline.features.server_state import STEP as STATE_STEP
from proxy.pipeline.job import Verdict
from proxy.store import open_store
from proxy.store.archive import Archive, Removed
from proxy.store.interface import SHARED_TENANT
from proxy.summary.store import Origin
from proxy.summary.times import LIFETIME
from proxy.telemetry.record import RequestRecord, new_id
from proxy.upstream.transport import HELD_SECONDS
from tests.docs.config_schema import docstrings
from tests.kit.configurations import loads
from tests.kit.records import written

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
PROMPTS = (ROOT / "docs" / "design" / "prompts.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ENVIRONMENT = {"OPENAI_API_KEY": "sk-test", "OTLP_KEY": "test"}


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """The pieces of code in a line."""
    return [span.replace(r"\|", "|") for span in re.findall(r"`([^`]+)`", text)]


def table(text: str, *heads: str) -> list[list[str]]:
    """The rows of all tables whose first columns have these heads."""
    rows = []
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        inside = bool(cells) and (inside or tuple(cells[: len(heads)]) == heads)
        rows += [cells] if inside else []
    return [row for row in rows if tuple(row[: len(heads)]) != heads and not set(row[0]) <= set("-: ")]


def prose(text: str) -> str:
    """The text without its code."""
    return re.sub(r"`[^`]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as the usual renderers make them."""
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(document: Path) -> list[str]:
    """The relative links that lead nowhere."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(link)
    return dead


def test_no_link_is_dead() -> None:
    assert {document.name: dead for document in DOCUMENTS if (dead := dead_links(document))} == {}


def test_a_dead_link_would_be_seen(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# A b\n[x](a.md) [x](#a-b) [x](https://a.example/b) `[x](code.md)` [x](b.md) ![x](a.md#c)\n")
    assert dead_links(document) == ["b.md", "a.md#c"]


def load(text: str) -> Settings:
    return loads(text.encode(), ENVIRONMENT)


@pytest.mark.parametrize("trigger", [spans(row[0]) for row in table(CONFIGURATION, "trigger", "meaning")], ids=str)
def test_triggers_are_spelled_as_a_file_takes_them(trigger: list[str]) -> None:
    for spelling in trigger:
        load(f"policies: {{default: {{trigger: {spelling}}}}}")


CONFIGURED = [path for path in DOCUMENTS if path.parent.name != "providers"]
"""The recipes for providers have variables of their own; test_recipes.py loads them."""


@pytest.mark.parametrize("document", CONFIGURED, ids=lambda document: document.name)
def test_the_configurations_in_a_document_load(document: Path) -> None:
    for block in blocks(document.read_text(encoding="utf-8"), "yaml"):
        if not block.startswith(("services:", "name:")):  # files of Compose and of Continue
            load(block)


def test_the_readme_has_a_configuration_of_ten_lines() -> None:
    (block,) = blocks(README, "yaml")
    assert len(block.splitlines()) <= 10
    assert load(block) != Settings()


def test_figures_are_those_in_force() -> None:
    shares = {row[0]: row[1].split(" %")[0] for row in table(PROMPTS, "part", "share of the budget")}
    in_force = (
        keeps.SUMMARY_SHARE,
        keeps.USER_SHARE,
        keeps.NEWEST_SHARE,
        keeps.SYSTEM_SHARE,
        keeps.NEWEST_SHARE,
        keeps.WORDS_SHARE,
        keeps.INDEX_SHARE,
        keeps.PLAN_SHARE,
        keeps.STATE_SHARE,
        keeps.GROUP_SHARE,
    )
    assert list(shares.values()) == [f"{share * 100:g}" for share in in_force]
    assert f"first {keeps.KEPT_CHARACTERS} characters" in CONFIGURATION
    assert f"for {LIFETIME / 86_400:g} days" in README
    assert f"archive, for {policy.ArchiveSettings().days} days" in " ".join(README.split())
    assert f"{keeps.USER_SHARE * 100:g} % of the budget" in README
    assert f"after {HELD_SECONDS:g} seconds" in README
    assert (NAMED_SECONDS, "for a day" in README) == (86_400, True)
    assert (GUESS_SECONDS, "for an hour" in README) == (3_600, True)


# A command of the program, or (with a slash before its name) a script; and what follows on the line.
INVOCATION = re.compile(
    r"(?:(?<![\w:/-])(?:compaction-proxy|python -m proxy) (?=[a-z])|scripts(?=/))(/?[a-z]+)(?![\w-])([^`\n#]*)"
)


def options(command: click.Command) -> set[str]:
    if isinstance(command, click.Group):
        return set().union(*(options(below) for below in command.commands.values()))
    return {name for parameter in command.params for name in parameter.opts if name.startswith("--")}


def invocations(text: str) -> list[tuple[str, set[str]]]:
    """The commands that a text names, with their options."""
    joined = text.replace("\\\n", " ")
    return [(name, set(re.findall(r"--[a-z0-9-]+", rest))) for name, rest in INVOCATION.findall(joined)]


@pytest.mark.parametrize(
    "name", ["README.md", "docs/configuration.md", "docs/stores.md", "config.example.yaml", "Dockerfile"]
)
def test_commands_and_options_exist(name: str) -> None:
    found = invocations((ROOT / name).read_text(encoding="utf-8"))
    assert found
    for command, given in found:
        known = main.commands.get(command.removeprefix("/"))
        assert os.access(f"{ROOT}/scripts{command}", os.X_OK) if command.startswith("/") else known, command
        assert given <= (options(known) if known else set()), command


def test_no_other_options_are_named() -> None:
    known = set().union(*(options(command) for command in main.commands.values()))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", README + CONFIGURATION + API)) <= known


def test_what_the_readme_shows_of_the_demonstration_is_what_it_shows() -> None:
    (shown,) = blocks(README, "text")
    assert re.findall(r"^│ (.+?) +│", shown, re.MULTILINE) == list(ROWS)
    assert f"An agent's session of 60 turns, window {WINDOW:,} tokens" in shown


def test_the_changelog_begins_with_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)[0] == __version__
    assert __version__ in CliRunner().invoke(main, ["--version"]).output


def answer(entrance: str, exchanges: int, **headers: str) -> httpx.Response:
    """Return the response to a conversation with this number of exchanges of some 1,500 tokens."""
    words = "one two three four five " * 300
    messages = [{"role": "user", "content": "Begin."}]
    for number in range(exchanges):
        messages += [{"role": "assistant", "content": f"{number} {words}"}, {"role": "user", "content": "Go on."}]
    body = {"model": "gpt-4o-mini", "messages": messages}
    return httpx.post(f"{entrance}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)


def test_the_response_headers_are_those_in_the_table(entrance: str) -> None:
    answers = [answer(entrance, 1), answer(entrance, 10), answer(entrance, 10)]
    assert [found.status_code for found in answers] == [200, 200, 200]
    seen = {name for found in answers for name in found.headers if name.startswith("x-compaction")}
    assert {"x-compaction-steps", "x-compaction-summary", "x-compaction-policy"} < seen <= set(Own)
    assert set(re.findall(r"x-compaction[a-z-]*", README + CONFIGURATION + API)) <= set(Own)


def test_the_response_headers_have_the_documented_values() -> None:
    meanings = docstrings(Own)
    assert {*spans(meanings["VERDICT"])} == {*get_args(Verdict), "pending", "unsupported"}
    assert {*spans(meanings["SUMMARY"])} == {*get_args(Origin)}
    assert {*spans(meanings["STEPS"])} == {render.SUMMARY, fit.NAME, STATE_STEP}
    assert {Own[name] for name in meanings} == {*Own}
    assert [spans(row[0])[0] for row in table(CONFIGURATION, "section", "what the stage does")] == [*NAMES]


def test_the_request_header_works_as_documented(entrance: str) -> None:
    asked = re.findall(r"`x-compaction: (\w+)`", README + API)
    assert asked
    for value in asked:
        assert answer(entrance, 1, **{"x-compaction": value}).headers["x-compaction"] == value


def archived(store_url: str) -> str:
    """The id of an entry in the archive of callers without a key."""
    removed = Removed("0" * 20, (b'{"role":"user","content":"Hello"}',))

    async def keep() -> None:
        store = open_store(store_url)
        archive = Archive(store)
        archive.keep(SHARED_TENANT, [removed], 3600)
        await archive.aclose()
        await store.aclose()

    asyncio.run(keep())
    return removed.id


def test_the_paths_in_the_table_are_served(entrance: str, store_url: str) -> None:
    paths = [span.split() for row in table(API, "path") for span in spans(row[0]) if "…" not in span]
    conversations = {"/v1/chat/completions", "/v1/responses", "/v1/messages"}
    served = {
        *conversations,
        "/v1/compress",
        "/",
        "/v1/models",
        "/compaction/archive/{id}",
        "/livez",
        "/readyz",
        "/metrics",
    }
    served |= {LINK_PATH, *PARAMETERS}
    assert {path for _, path in paths} == served
    id = archived(store_url)
    written(Path(store_url.removeprefix("sqlite:///")), [record := RequestRecord(new_id(), 1.0, tenant=SHARED_TENANT)])
    with httpx.Client(trust_env=False, timeout=60) as http:
        for method, path in paths:
            body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]} if method == "POST" else None
            known = record.id if path == REQUEST else id
            answered = http.request(method, entrance + path.format(id=known), json=body)
            unchanged = path == DIFF and "no changed request" in answered.text
            assert answered.status_code == (404 if unchanged else 303 if path == "/" else 200), path
            assert (answered.headers.get("x-compaction") == "none") is (path in {*conversations, "/v1/compress"}), path


def test_the_picture_stands_by_itself() -> None:
    picture = ROOT / "docs" / "images" / "conversation.svg"
    content = picture.read_text(encoding="utf-8")
    expat.ParserCreate().Parse(content, True)
    assert f"]({picture.relative_to(ROOT)})" in README
    assert "prefers-color-scheme: dark" in content
    assert re.findall(r"(?:xlink:)?href|url\(|@import|<script|<image|@font-face", content) == []
    assert re.findall(r"font(?:-family)?: (?:\d+px )?([a-z][^;}]*?) ?[;}]", content) == ["system-ui, sans-serif"]
