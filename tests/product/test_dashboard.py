"""Test that the dashboard shows each team its own requests, and that its pages need no other host."""

import contextlib
import html
import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog.testing

from tests.kit.messages import words
from tests.kit.scripted import behind, chat, key_hash
from tests.kit.upstream import StandIn
from tests.product.browser import CHROMIUM, DRIVER, ENTER, MISSING, TAB, browser

RED, BLUE, ADMIN = "cp-red", "cp-blue", "cp-admin"
UNTIL = (
    "for (let i = 0; i < 200; i++) { if (%s) return true; await new Promise(r => setTimeout(r, 50)); } return false;"
)
PAGES = ("/compaction/", "/compaction/savings")
PROMPT = "Summarize {messages} for the next engineer. " * 60
"""Longer than a line of a page."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A proxy with two teams, each with a compacted request."""
    folder = tmp_path_factory.mktemp("dashboard")
    sections = {
        "auth": {"mode": "keys"},
        "admin": {"keys": [key_hash(ADMIN)]},
        "teams": {"red": {"keys": [key_hash(RED)]}, "blue": {"keys": [key_hash(BLUE)], "policy": "quiet"}},
        "policies": {"default": {"summary": {"prompt": PROMPT}}, "quiet": {"mode": "shadow"}},
        "store": {"url": f"sqlite:///{folder}/c.db"},
        "prices": {"gpt-5": {"input_cost_per_token": 0.000001}},
    }
    with behind(StandIn(window=16_000), folder, **sections) as address:
        for team, key in (("red", RED), ("blue", BLUE)):
            messages = chat(30, 400)
            messages[1]["content"] = f"<b>{team}-secret</b> " + words(100)
            answer = asked(address, key, messages)
            assert answer.status_code == (200 if team == "red" else 400)
        yield address


def asked(url: str, key: str, messages: list[Any]) -> httpx.Response:
    body = {"model": "gpt-5", "messages": messages}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False, timeout=60)


@contextlib.contextmanager
def signed_in(url: str, key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        answer = client.post("/compaction/sign-in", data={"key": key})
        assert (answer.status_code, answer.headers["location"]) == (303, "/compaction/"), answer.text
        assert "HttpOnly; SameSite=Strict" in answer.headers["set-cookie"]
        assert key not in answer.headers["set-cookie"]
        yield client


def listed(client: httpx.Client) -> list[dict[str, Any]]:
    """The records, once they are written."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found: list[dict[str, Any]] = client.get("/compaction/requests").json()["data"]
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("no records")


def test_a_page_shows_its_own_teams_requests_only(url: str) -> None:
    with signed_in(url, RED) as red, signed_in(url, BLUE) as blue, signed_in(url, ADMIN) as admin:
        (mine,) = listed(red)
        (theirs,) = listed(blue)
        assert {one["team"] for one in listed(admin)} == {"red", "blue"}
        for client, own, other in ((red, mine, theirs), (blue, theirs, mine)):
            page = client.get("/compaction/").text
            assert own["id"] in page
            assert other["id"] not in page
            assert client.get(f"/compaction/view/{own['id']}").status_code == 200
            assert client.get(f"/compaction/view/{other['id']}").status_code == 404
            for view in ("", "/diff"):
                assert client.get(f"/compaction/requests/{other['id']}{view}").status_code == 404
        page = admin.get("/compaction/").text
        assert mine["id"] in page
        assert theirs["id"] in page


def test_a_request_page_shows_content_escaped_and_equals_the_json(url: str) -> None:
    with signed_in(url, RED) as client:
        (one,) = listed(client)
        page = client.get(f"/compaction/view/{one['id']}").text
        assert "&lt;b&gt;red-secret&lt;/b&gt;" in page
        assert "<b>" not in page
        for sentence in one["explanation"]:
            assert sentence in page.replace("&#39;", "'")
        diff = client.get(f"/compaction/requests/{one['id']}/diff").json()
        replaced = next(change for change in diff["changes"] if change.get("summary"))
        window = one["window"]
        gone = page.count('summarized</span> <span class="start">')
        assert len(replaced["before"]) - 1 <= gone <= len(replaced["before"]), "the question at work is kept"
        assert re.search(rf"<p>{gone} messages \(numbers 2 to [0-9]+, [0-9,]+ tokens\) left the prompt\.", page)
        assert f"left the prompt. A summary of {window['summary']:,} tokens replaces them." in page
        numbers = re.findall('<span class="at">([0-9]*)<', page)
        assert numbers == [str(number + 1) for number in range(62)], "every message has a line"
        assert window["size"] == 16_000
        assert sum(window[part] for part in ("instructions", "tools", "summary", "messages")) == one["tokens"]["sent"]
        assert window["free"] == 16_000 - one["tokens"]["sent"] - window["answer"]
        assert f"summary: {window['summary']:,} tokens" in page
        (message,) = replaced["after"]
        for title, text in re.findall(r"<h3>([^<]*)</h3></summary><pre[^>]*>([^<]*)</pre>", page):
            assert text, title
            assert html.unescape(text) in message["content"]
            assert title == "Introduction" or f"## {html.unescape(title)}\n" in message["content"]
        assert "<h3>Summary</h3>" in page


def test_a_page_without_messages_says_why(tmp_path: Path) -> None:
    cases: list[tuple[Any, int, str]] = [
        ({"archive": None}, 30, "The policy stores no messages (policies.default.archive: null)."),
        ({}, 1, "The proxy sent this request as it came."),
        ({"mode": "shadow"}, 14, "The proxy sent this request as it came. It stores only messages that it changes."),
    ]
    for policy, turns, reason in cases:
        folder = tmp_path / str(turns)
        folder.mkdir()
        with behind(StandIn(window=16_000), folder, policy=policy) as url, keyed(url, RED) as client:
            assert asked(url, RED, chat(turns, 400)).status_code == 200
            (one,) = listed(client)
            page = client.get(f"/compaction/view/{one['id']}").text
            assert reason in page
            assert "<h2>Messages" not in page
            assert ('class="legend"' in page) is (one["window"] is not None) is (turns > 1)


def test_figures_on_pages_equal_those_of_the_report(url: str) -> None:
    with signed_in(url, ADMIN) as client:
        listed(client)
        total = client.get("/compaction/report?since=7d&by=team").json()["total"]
        page = client.get("/compaction/savings").text
        found = re.findall(r'<span class="tile-value">([^<]*)</span> ([^<]*)<', page)
        tiles = {name: value for value, name in found}
        assert tiles["tokens received"] == f"{total['received']:,}"
        assert tiles["tokens sent"] == f"{total['sent']:,}"
        assert tiles["requests"] == str(total["requests"])
        assert tiles["USD saved, net"] == total["savings"]
        assert tiles["USD that enforce would save in addition"] == total["shadow_savings"]
        assert (tiles["compacted"], tiles["enforce would compact"]) == ("1", "1")
        assert "Requests in shadow mode: blue (1, the last on " in page


def test_a_team_sees_its_own_policies_only(url: str) -> None:
    for key, own in ((RED, "default"), (BLUE, "quiet")):
        with signed_in(url, key) as client:
            names = set(re.findall(r"<option[^>]*>([^<]*)</option>", client.get("/compaction/").text))
            assert names & {"default", "quiet"} == {own}


def test_an_unknown_request_gets_a_page_that_says_so(url: str) -> None:
    with signed_in(url, RED) as red, signed_in(url, BLUE) as blue:
        (theirs,) = listed(blue)
        for id in ("0" * 24, "unknown", theirs["id"]):
            answer = red.get(f"/compaction/view/{id}")
            assert answer.status_code == 404
            assert "<h1>Not found</h1>" in answer.text
            assert "team red" in answer.text
            assert 'type="password"' not in answer.text


@pytest.mark.parametrize("session", [True, False])
def test_who_reads_messages_is_logged_and_an_admin_key_can_be_kept_from_it(tmp_path: Path, *, session: bool) -> None:
    figures = {"hash": key_hash("cp-figures"), "name": "figures", "content": False}
    support = {"hash": key_hash("cp-support"), "name": "support"}
    unnamed = key_hash("cp-unnamed")
    sections = {
        "auth": {"mode": "keys"},
        "admin": {"keys": [figures, support, unnamed]},
        "teams": {"red": {"keys": [key_hash(RED)]}},
    }
    with structlog.testing.capture_logs() as logs, behind(StandIn(window=16_000), tmp_path, **sections) as url:
        messages = chat(30, 400)
        messages[1]["content"] = f"red-secret {words(100)}"
        assert asked(url, RED, messages).status_code == 200
        with signed_in(url, RED) as client:
            (one,) = listed(client)
        paths = [f"/compaction/view/{one['id']}", f"/compaction/requests/{one['id']}/diff"]
        seen = {}
        for key in ("cp-figures", "cp-support", "cp-unnamed", RED):
            with contextlib.ExitStack() as stack:
                client = stack.enter_context(signed_in(url, key) if session else keyed(url, key))
                assert client.get(f"/compaction/requests/{one['id']}").status_code == 200
                answers = [client.get(path) for path in paths]
            seen[key] = [answer.status_code for answer in answers], "red-secret" in answers[0].text + answers[1].text
            if key == "cp-figures":
                assert answers[1].json()["error"]["code"] == "content_not_allowed"
                assert "content: false" in answers[0].text
        assert seen.pop("cp-figures") == ([200, 403], False)
        assert set(map(str, seen.values())) == {str(([200] * 2, True))}
    reads = [line for line in logs if line["event"] == "content.read"]
    assert {line["record"] for line in reads} == {one["id"]}
    readers = [line["reader"] for line in reads]
    hashed = "administrator " + unnamed[:19]
    assert readers == ["administrator support"] * 2 + [hashed] * 2 + ["team red"] * 2


@contextlib.contextmanager
def keyed(url: str, key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, headers={"authorization": f"Bearer {key}"}) as client:
        yield client


def test_without_a_session_there_is_a_sign_in_page(url: str) -> None:
    slashless = httpx.get(f"{url}/compaction", trust_env=False)
    assert (slashless.status_code, slashless.headers["location"]) == (303, "/compaction/")
    with httpx.Client(base_url=url, trust_env=False) as client:
        for path in (*PAGES, "/compaction/view/" + "0" * 24):
            answer = client.get(path)
            assert (answer.status_code, "Sign in" in answer.text) == (401, True), path
        for key, reason in (("", "Enter a key."), ("cp-wrong", "This key isn't known here.")):
            answer = client.post("/compaction/sign-in", data={"key": key})
            assert answer.status_code == 401
            (problem,) = re.findall('class="problem">([^<]*)<', answer.text)
            assert problem.replace("&#39;", "'").startswith(reason)
            assert "Authorization" not in answer.text
        for cookie, reason in (("other=1", ""), ("compaction_session=1", "Your session has ended. Sign in again.")):
            answer = client.get("/compaction/", headers={"cookie": cookie})
            assert (answer.status_code, "".join(re.findall('class="problem">([^<]*)<', answer.text))) == (401, reason)
        # The digests of keys are in the configuration, so a digest alone must not be enough.
        digest = key_hash(RED).removeprefix("sha256:")
        for cookie in (f"{digest}.9999999999.{'0' * 64}", f"{digest}.9999999999", digest, "..", ""):
            forged = {"cookie": f"compaction_session={cookie}"}
            assert client.get("/compaction/requests", headers=forged).status_code == 401, cookie
    with signed_in(url, RED) as client:
        own = client.cookies["compaction_session"]
        later = re.sub(r"\.\d+\.", ".9999999999.", own)
        for cookie, status in (
            (own, 200),
            (later, 401),
            (f'"{own}"', 401),
            (f"1; a; compaction_session={own} ;b", 200),
        ):
            headers = {"cookie": f"compaction_session={cookie}"}
            assert httpx.get(f"{url}/compaction/requests", headers=headers, trust_env=False).status_code == status
        foreign = {"sec-fetch-site": "same-site"}
        assert client.get("/compaction/requests", headers=foreign).status_code in (401, 403)
        assert client.post("/compaction/sign-out").status_code == 303
        assert client.get("/compaction/requests").status_code == 401


def test_pages_need_no_other_origin_and_no_inline_code(url: str) -> None:
    with signed_in(url, ADMIN) as client:
        (one, *_) = listed(client)
        for path in (*PAGES, f"/compaction/view/{one['id']}"):
            answer = client.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
            assert not re.search(
                r"https?://|//[a-z]|\son\w+=|\sstyle=|<style|<script(?! src=\"/compaction/)", answer.text
            )
        for name in ("style.css", "app.js"):
            assert client.get(f"/compaction/assets/{name}").status_code == 200
        assert client.get("/compaction/assets/base.html").status_code == 404


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)
def test_new_requests_appear_while_the_page_is_open(url: str, tmp_path: Path) -> None:
    port = url.rsplit(":", 1)[1]
    with browser(tmp_path, f"MAP 127.0.0.1:{port} 127.0.0.1:{port}") as window:
        window.size(1280)
        window.open(f"{url}/compaction/")
        window.run("document.querySelector('#key').value = given[0]; document.querySelector('form').submit()", ADMIN)
        assert window.run(UNTIL % "document.querySelector('#live')")
        rows = "document.querySelectorAll('#requests tbody tr').length"
        before = window.run(f"return {rows}")
        assert before >= 2
        window.run("document.querySelector('#live').click()")
        asked(url, RED, [{"role": "user", "content": "hi"}])
        assert window.run(UNTIL % f"{rows} > {before}")
        assert window.run(f"return {rows}") == before + 1
        assert window.run("return document.querySelector('#announce').textContent") == "1 new requests"
        unlabeled = (
            "return [...document.querySelectorAll('input,select,textarea')].filter(e => !e.labels.length).length"
        )
        view = "/compaction/view/" + window.run("return document.querySelector('#requests a').href").rpartition("/")[2]
        fitting = (
            "return [document.documentElement, ...document.querySelectorAll('.scroll, td, dd, .tile-value')]"
            ".every(e => e.scrollWidth <= e.clientWidth)"
        )
        for width, path in itertools.product((1280, 390), (*PAGES, view)):
            window.size(width)
            window.open(f"{url}{path}")
            assert window.run(unlabeled) == 0
            assert window.run(fitting), (path, width)


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)
def test_messages_unfold_with_the_keyboard_and_fit_a_narrow_window(url: str, tmp_path: Path) -> None:
    port = url.rsplit(":", 1)[1]
    with browser(tmp_path, f"MAP 127.0.0.1:{port} 127.0.0.1:{port}") as window, signed_in(url, RED) as client:
        window.open(f"{url}/compaction/")
        window.run("document.querySelector('#key').value = given[0]; document.querySelector('form').submit()", RED)
        assert window.run(UNTIL % "document.querySelector('#live')")
        one = next(one for one in listed(client) if one["verdict"] == "compacted")
        for width in (1280, 390):
            window.size(width)
            window.open(f"{url}/compaction/view/{one['id']}")
            focused = "document.activeElement.closest('details')"
            for place in (".run", ".run details.message"):
                reached = f"document.activeElement === document.querySelector('{place} > summary')"
                assert any(window.press(TAB) or window.run(f"return {reached}") for _ in range(60)), place
                assert window.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
                assert window.run(f"return {focused}.open") is False
                window.press(ENTER)
                assert window.run(f"return {focused}.open") is True
            text = window.run(f"return {focused}.querySelector('pre').innerText")
            assert text.startswith("<b>red-secret</b>")
            window.run("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert window.run("return document.documentElement.scrollWidth <= innerWidth")
