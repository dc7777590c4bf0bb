"""Find requests without their ids: by the path, the command, and the page, which share one query."""

import contextlib
import html
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest
import yaml

from proxy.config import load
from proxy.pipeline.recorder import BEGINNING, _tag
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from tests.kit.messages import assistant, user, words
from tests.kit.program import ROOT, call, terminal
from tests.kit.scripted import PROFILE, chat, client, key_hash
from tests.kit.upstream import EveryApi, Reply, StandIn, summarise
from tests.kit.waiting import until

TURNS = [user("Where is the map?"), assistant("In the hall."), user("And the key?")]
PRICED = {"gpt-5": {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6}}


class Door(NamedTuple):
    """A proxy with two teams of two keys each, and its folder."""

    url: str
    folder: Path
    ends: contextlib.ExitStack

    def client(self, key: str) -> openai.OpenAI:
        return self.ends.enter_context(client(self.url, key))

    def listed(self, caller: str = "sk-admin", **filters: str) -> list[dict[str, Any]]:
        headers = {"authorization": f"Bearer {caller}"}
        answer = httpx.get(f"{self.url}/compaction/requests", params=filters, headers=headers, trust_env=False)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["data"])

    def page(self, path: str = "", **filters: str) -> httpx.Response:
        headers = {"authorization": "Bearer sk-admin"}
        return httpx.get(f"{self.url}/compaction/{path}", params=filters, headers=headers, trust_env=False)

    def command(self, *arguments: str, columns: int = 80) -> str:
        done = call(self.folder, "requests", "--config", "config.yaml", *arguments, COLUMNS=str(columns))
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


@contextlib.contextmanager
def door(folder: Path, app: Any, store: str, **policy: Any) -> Iterator[Door]:
    teams = {
        name: {"keys": [{"hash": key_hash(f"sk-{name}"), "name": f"{name}-laptop"}, key_hash(f"sk-{name}-2")]}
        for name in ("red", "blue")
    }
    teams["blue"]["limits"] = {"spend": {"tokens": 5, "per": "day"}}  # type: ignore[assignment]
    with serve(app) as upstream:
        settings = {
            "auth": {"mode": "keys"},
            "admin": {"keys": [key_hash("sk-admin")]},
            "upstreams": {"main": {"base_url": f"{upstream}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
            "policies": {"default": policy},
            "teams": teams,
            "prices": PRICED,
            "store": {"url": store or f"sqlite:///{folder}/store.db"},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        with serve(Proxy(load(folder / "config.yaml", {}))) as url, contextlib.ExitStack() as ends:
            yield Door(url, folder, ends)


@pytest.fixture(params=["sqlite", "redis"])
def store(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("redis").url if request.param == "redis" else ""


def test_each_filter_selects_the_same_requests_by_every_way(tmp_path: Path, store: str) -> None:
    def answer(body: Mapping[str, Any]) -> Reply:
        if body["model"] == "gpt-new":
            error = {"message": "secret text", "type": "invalid_request_error", "param": "tools", "code": "bad_tools"}
            return Reply(status=400, error={"error": error})
        return Reply(content="Here.")

    app = EveryApi(responder=answer).app
    with door(tmp_path, app, store) as here:
        red, blue = here.client("sk-red"), here.client("sk-blue-2")
        red.chat.completions.create(model="gpt-5", messages=TURNS[:1], user="alice")
        red.chat.completions.create(model="gpt-5", messages=TURNS, user="alice")
        with pytest.raises(openai.BadRequestError):
            red.chat.completions.create(model="gpt-new", messages=TURNS)
        blue.chat.completions.create(model="gpt-5", messages=TURNS[:1])
        with pytest.raises(openai.APIStatusError, match="402"):
            blue.chat.completions.create(model="gpt-5", messages=TURNS[:1])
        claude = here.ends.enter_context(anthropic.Anthropic(base_url=here.url, api_key="sk-red", max_retries=0))
        claude.messages.create(model="m", max_tokens=9, messages=TURNS[:1], metadata={"user_id": "bob"})  # type: ignore[typeddict-item]
        until(lambda: len(here.listed()) == 6)
        first, second, bad, paid, refused, other = reversed(here.listed())
        assert first["conversation"] == second["conversation"] != other["conversation"]
        assert first["user"] == second["user"] != other["user"]
        assert bad["user"] is None
        assert len({first["conversation"], paid["conversation"], bad["conversation"]}) == 3, "user and team count"
        assert (first["key"], paid["key"]) == ("red-laptop", key_hash("sk-blue-2")[7:19])
        assert first["client"] == f"OpenAI/Python {openai.__version__}"
        assert other["client"] == f"Anthropic/Python {anthropic.__version__}"
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))
        slow = [one for one in here.listed() if one["ms"]["total"] >= 5]
        for filters, wanted in (
            ({"status": "4xx"}, [refused, bad]),
            ({"status": "402"}, [refused]),
            ({"error": "bad_tools"}, [bad]),
            ({"error": "budget_exceeded", "team": "blue"}, [refused]),
            ({"team": "blue"}, [refused, paid]),
            ({"key": "red-laptop", "status": "200"}, [other, second, first]),
            ({"model": "gpt-5", "user": "alice"}, [second, first]),
            ({"user": first["user"]}, [second, first]),
            ({"user": "nobody"}, []),
            ({"api": "messages"}, [other]),
            ({"verdict": "refused"}, [refused]),
            ({"since": "5m", "until": now, "api": "messages"}, [other]),
            ({"until": "1h"}, []),
            ({"slow": "5"}, slow),
            ({"conversation": second["conversation"]}, [second, first]),
            ({"client": "Anthropic/Python"}, [other]),
            ({"client": f"OpenAI/Python {openai.__version__}", "status": "4xx"}, [refused, bad]),
            ({"client": "Python"}, []),
        ):
            ids = [one["id"] for one in wanted]
            assert [one["id"] for one in here.listed(**filters)] == ids, filters
            shown = re.findall(r"view/([0-9a-f]{24})", here.page(**filters).text)
            assert shown == ids, filters
            options = [part for name, value in filters.items() for part in (f"--{name}", value)]
            lines = here.command("--json", *options).splitlines()
            assert [json.loads(line)["id"] for line in lines] == ids, filters
            text = here.command(*options)
            assert all(len(line) <= 80 for line in text.splitlines()), text
            assert all(id in text for id in ids) or "pass --json, or more filters" in text
            assert all(id in here.command(*options, columns=120) for id in ids)
        text = here.command("--error", "bad_tools")
        cause = "upstream: code bad_tools, type invalid_request_error, param tools"
        assert cause in text
        assert cause in here.page(error="bad_tools").text
        assert "By key" in here.page("savings").text
        shown = call(tmp_path, "show", bad["id"], "--config", "config.yaml").stdout.splitlines()
        assert shown[0] == "The response had status 400."
        assert re.match(r"Attempt 1 got status 400 .*, which states code bad_tools", shown[1])
        assert "secret text" not in here.page(f"view/{bad['id']}").text + text
        assert here.listed("sk-blue", team="red") == []
        assert here.page(id=first["id"]).headers["location"] == f"/compaction/view/{first['id']}"
        assert "id: must be the 24 digits" in here.page(id="x").text
        assert "must be a status such as 429, or a class such as 4xx" in here.page(status="6xx").text


def test_a_conversation_has_its_turns_and_sums_and_a_slow_summary_is_seen(tmp_path: Path) -> None:
    def late(body: Mapping[str, Any]) -> Reply:
        time.sleep(0.4)
        return summarise(body)

    upstream = StandIn(window=200_000, summariser=late)
    with door(tmp_path, upstream.app, "", prepare=None) as here:
        red, talk = here.client("sk-red"), chat(14, 550)
        red.chat.completions.create(model="gpt-5", messages=talk[:4])
        for _ in range(2):
            red.chat.completions.create(model="gpt-5", messages=talk)
        until(lambda: len(here.listed()) == 3)
        again, compacted, first = here.listed()
        assert len({one["conversation"] for one in (again, compacted, first)}) == 1
        ms = compacted["ms"]
        assert 400 <= ms["summary"] <= ms["first_byte"] - ms["upstream"] - ms["compaction"] - ms["body"]
        assert ms["compaction"] > 0
        assert ms["upstream"] > 0
        assert (again["ms"]["summary"] or 0) < 400
        shown = call(here.folder, "show", compacted["id"], "--config", "config.yaml").stdout
        assert f"The request waited {ms['summary']:,.0f} ms for the summary." in shown
        (line,) = (one for one in shown.splitlines() if one.startswith("Summary call "))
        assert re.search(r"to gpt-5: The call took [4-9]\d\d ms\. It cost 0\.0\d+ USD", line), line
        text = here.command("--conversation", first["conversation"])
        order = [text.index(one["id"]) for one in (first, compacted, again)]
        assert order == sorted(order)
        sums = r"3 requests, 2 compacted, 0 failed; 1 checkpoint; 0\.\d+ USD,\s+and\s+1\s+summary\s+call for 0\.\d+ USD"
        assert re.search(sums, text), text
        page = here.page(f"conversation/{first['conversation']}").text
        assert re.search(sums, page)
        assert "summary made after" in page
        assert here.page("conversation/0123456789abcdef").status_code == 404
        assert f"wait for a summary, ms</dt><dd>{ms['summary']:,.0f}</dd>" in here.page(f"view/{compacted['id']}").text


def test_a_request_that_waited_for_an_earlier_summary_names_the_call(tmp_path: Path, store: str) -> None:
    upstream = StandIn(window=16_000, summariser=lambda body: Reply(content="Goal: NOTES.", delay=3))
    with door(tmp_path, upstream.app, store, summary={"model": "gpt-5-notes"}) as here:
        red, talk = here.client("sk-red"), chat(5, 1_000)[:-1]
        for number in range(12):
            talk.append(user(f"Question {number}: {words(300, f'n{number}x')}"))
            red.chat.completions.create(model="gpt-5", messages=talk)
            talk.append(assistant(f"Answer {number}: {words(300, f'm{number}x')}"))
            if until(lambda: bool(upstream.summaries), 0.3):
                break
        red.chat.completions.create(model="gpt-5", messages=[*talk, user(words(1_500, "lastx"))])
        until(lambda: here.listed()[0]["verdict"] == "compacted")
        waited, began = here.listed()[:2]
        assert (waited["ms"]["summary"] > 400, began["verdict"]) == (True, "none")
        request = f"{here.url}/compaction/requests/{waited['id']}"
        headers = {"authorization": "Bearer sk-red"}
        (one,) = httpx.get(request, headers=headers, trust_env=False).json()["summary_calls"]
        assert (one["parent"], one["model"], len(upstream.summaries)) == (began["id"], "gpt-5-notes", 1)
        shown = call(tmp_path, "show", waited["id"], "--config", "config.yaml").stdout
        text = f"to gpt-5-notes, which request {began['id']} began: The call took 3,"
        assert re.search(f"Summary call {one['id']} {text}" + r"\d{3} ms\. .* price", shown), shown
        page = here.page(f"view/{waited['id']}").text
        assert f'<td>gpt-5-notes, begun by <a href="/compaction/view/{began["id"]}">' in page
        assert f"show {began['id']}\n" in here.command("--model", "gpt-5-notes")


def test_a_summary_call_that_the_proxy_ended_says_so_and_why_it_may_cost(tmp_path: Path) -> None:
    upstream = StandIn(
        window=200_000,
        summariser=lambda body: Reply(content="Goal: NOTES.", delay=6 if body["model"] == "gpt-5" else 0),
    )
    with door(tmp_path, upstream.app, "", prepare=None, summary={"fallback_model": "quick", "timeout": 1}) as here:
        here.client("sk-red").chat.completions.create(model="gpt-5", messages=chat(14, 550))
        until(lambda: len(here.listed()) == 1)
        (one,) = here.listed()
        assert one["summary"]["origin"] == "made"
        shown = call(tmp_path, "show", one["id"], "--config", "config.yaml").stdout
        ended = r"to gpt-5: The call took [\d,]+ ms\. The call ended without a response \(canceled\)\."
        assert re.search(ended + r" The upstream may bill the prompt\. It cost 0\.0\d+ USD \(estimated\)\.", shown), (
            shown
        )
        sums = " ".join(here.command("--conversation", one["conversation"]).split())
        assert "and 2 summary calls (1 failed) for 0.0" in sums


def test_the_messages_of_a_request_can_be_read_on_a_narrow_terminal(tmp_path: Path) -> None:
    with door(tmp_path, StandIn(window=16_000).app, "") as here:
        talk = chat(30, 400)
        talk[1]["content"] = f"Never deploy on Fridays. {'x' * 300} the end"
        answer = here.client("sk-red").chat.completions.create(model="gpt-5", messages=talk)
        assert answer.choices
        until(lambda: len(here.listed()) == 1)
        (one,) = here.listed()
        show = ("show", one["id"], "--config", "config.yaml")
        brief = terminal(tmp_path, *show, columns=80)
        assert max(map(len, brief.splitlines())) <= 80
        window = one["window"]
        assert re.search(rf"summary +{window['summary']:,}\n  messages +{window['messages']:,}\n", brief)
        gone = re.search(r"^summarized +(\d+) messages \(numbers 2 to (\d+), ", brief, re.MULTILINE)
        assert gone is not None
        assert int(gone[1]) == int(gone[2]) - 1
        assert "Never deploy" not in brief
        whole = terminal(tmp_path, *show, "--messages", columns=80)
        assert re.search("^    2 user, [0-9]+ tokens, summarized$", whole, re.MULTILINE)
        assert f"      Never deploy on Fridays. {'x' * 300} the end" in whole
        assert "\n## Summary\n" in whole
        omitted = re.search(r"^\[(\d+) earlier user messages are only in the summary below\.\]", whole, re.MULTILINE)
        assert omitted is not None
        sentence = f"Only the summary has {omitted[1]} of the user's messages"
        assert sentence in brief
        assert sentence in html.unescape(here.page(f"view/{one['id']}").text)
        assert call(tmp_path, *show, "--json", "--messages").returncode == 2


def test_a_list_has_one_line_for_each_request_and_more_for_what_stands_out(tmp_path: Path) -> None:
    with door(tmp_path, StandIn(window=200_000, summariser=summarise).app, "", prepare=None) as here:
        red, blue, talk = here.client("sk-red"), here.client("sk-blue"), chat(17, 450)
        talk[1]["content"] += " The map is in src/atlas/north_map.py, and its number is 48151623."
        for turn in (ends := range(2, len(talk) + 1, 2)):
            red.chat.completions.create(model="gpt-5.2-codex", messages=talk[:turn], user="alice")
        until(lambda: len(here.listed()) == len(ends))
        turns = here.listed()
        (first,) = [one for one in turns if one["summary"]["origin"] == "made"]
        blue.chat.completions.create(model="gpt-5", messages=TURNS)
        with pytest.raises(openai.APIStatusError):
            blue.chat.completions.create(model="gpt-5", messages=TURNS)
        until(lambda: len(here.listed()) == len(turns) + 2)
        lines = here.command("--conversation", first["conversation"]).splitlines()
        assert [re.findall("[0-9a-f]{24}", line) for line in lines if line[2] == ":"] == [
            [one["id"]] for one in reversed(turns)
        ]
        assert len(lines) <= len(turns) + 7, "a heading, a note about the compaction, and sums"
        assert "gpt-5.2-codex, red/red-laptop, OpenAI/Python" in lines[0]
        (note,) = (number for number, line in enumerate(lines) if line.startswith("    1 checkpoint, summary made"))
        sizes = first["tokens"]
        assert f" compacted {sizes['before']:,} → {sizes['sent']:,} " in lines[note - 1]
        names = r"[0-9]+% of the names kept \(identifiers, files, numbers; other facts may be gone\)"
        assert re.search(names, " ".join(" ".join(lines[note : note + 3]).split()))
        newest = here.command("--conversation", first["conversation"], "--limit", "3")
        assert re.findall("[0-9a-f]{24}", newest)[-3:] == [one["id"] for one in reversed(turns[:3])]
        assert f"\n{len(turns) - 3} older requests match. To list them, pass --limit or --until.\n" in newest
        assert f"{len(turns)} requests, " in " ".join(newest.split()), "the sums are those of all"
        assert f"\n{len(turns)} older requests match. " in here.command("--limit", "2")
        mixed = here.command()
        assert "older" not in mixed
        assert max(map(len, mixed.splitlines())) <= 80
        assert mixed.count("\n") <= len(turns) + 10, "others are few"
        assert first["id"] in mixed
        assert f"{here.listed(error='budget_exceeded')[0]['id']}\n    budget_exceeded; the team's limit is 5" in mixed
        assert mixed.endswith("\nFor the other ids, pass --json, or more filters.\n")


def test_a_refused_request_names_the_budget_what_was_spent_and_when_it_begins_again(tmp_path: Path) -> None:
    with door(tmp_path, StandIn().app, "") as here:
        blue = here.client("sk-blue")
        spent = blue.chat.completions.create(model="gpt-5", messages=TURNS).usage
        with pytest.raises(openai.APIStatusError, match="402"):
            blue.chat.completions.create(model="gpt-5", messages=TURNS)
        until(lambda: len(here.listed()) == 2)
        refused = here.listed()[0]
        assert spent is not None
        again = time.strftime("%Y-%m-%d 00:00:0", time.gmtime(time.time() + 86_400))
        sentence = (
            "The team has a limit of 5 tokens per day (spend). "
            f"It had used {spent.total_tokens} tokens. It accepts requests again at {again}"
        )
        assert sentence in call(here.folder, "show", refused["id"], "--config", "config.yaml").stdout
        page = here.page(f"view/{refused['id']}").text
        assert sentence in page
        assert "The proxy didn&#39;t send this request to an upstream." in page
        assert refused["refused_by"]["used"] == f"{spent.total_tokens} tokens"


def test_the_commands_of_troubleshooting_lead_to_the_cause(tmp_path: Path) -> None:
    def answer(body: Mapping[str, Any]) -> Reply:
        return Reply(status=400, error={"error": {"code": "bad_tools"}}) if body["model"] == "new" else Reply()

    rows = re.findall(r'^\| "(.+?)" \| (.+?) \|', (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    with door(tmp_path, StandIn(responder=answer).app, "") as here:
        red, blue = here.client("sk-red"), here.client("sk-blue")
        red.chat.completions.create(model="gpt-5", messages=TURNS, user="alice")
        for client, model in ((blue, "gpt-5"), (red, "new"), (blue, "gpt-5")):
            with contextlib.suppress(openai.APIStatusError):
                client.chat.completions.create(model=model, messages=TURNS)
        until(lambda: len(here.listed()) == 4)
        refused, bad, _, first = here.listed()
        seen = {}
        for complaint, cell in rows:
            id = first["conversation"] if "forgot" in complaint else bad["id"]
            team = "blue" if "budget" in complaint else "red"
            commands = re.findall(r"`((?:requests|report|show) .+?)`", cell.replace("--user NAME", "--user alice"))
            words = [
                [{"NAME": team, "DAY": "1d", "ID": id}.get(word, word) for word in one.split()] for one in commands
            ]
            done = [call(tmp_path, *one, "--config", "config.yaml") for one in words]
            assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * len(done)
            seen[complaint] = [set(re.findall(r"[\w-]+", one.stdout)) for one in done]
    by_team, by_key = seen["The bill doubled."]
    assert by_team >= {"blue", "red"}
    assert by_key >= {"red-laptop", "gpt-5", "new"}
    assert "blue" not in by_key
    failing, _ = seen["It fails since the new version."]
    assert failing & {bad["id"], refused["id"]} == {bad["id"]}
    refusals, spent = seen["The budget is gone."]
    assert refused["id"] in refusals
    assert "blue-laptop" in spent
    assert first["id"] in seen["It forgot what I said."][1]


def test_a_name_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    with door(tmp_path, StandIn().app, "") as here:
        here.client("sk-red").chat.completions.create(model="gpt-5", messages=TURNS)
        until(lambda: len(here.listed()) == 1)
        for options, fix in (
            (["--team", "nope"], "There is no team 'nope'. Fix: use one of: blue, red"),
            (["--team", "rad", "--json"], "There is no team 'rad'. Fix: did you mean 'red'?"),
            (["--key", "red-lap"], "There is no key 'red-lap'. Fix: did you mean 'red-laptop'?"),
            (["--policy", "nope"], "There is no policy 'nope'. Fix: use one of: default"),
        ):
            done = call(tmp_path, "requests", "--config", "config.yaml", *options)
            assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{fix}\n")
        for options in (["--user", "nope"], ["--team", "blue"], ["--key", "blue-laptop"], ["--model", "nope"]):
            assert here.command(*options) == "No requests match.\n"
        reported = call(tmp_path, "report", "--config", "config.yaml", "--team", "nope")
        assert (reported.returncode, "There is no team 'nope'" in reported.stderr) == (2, True)


def test_a_tag_depends_on_the_beginning_and_the_length_of_each_text() -> None:
    key, long = b"k" * 32, "x" * BEGINNING
    texts = [
        ("ab", "c"),
        ("a", "bc"),
        ("\ud83d",),
        (long,),
        (f"{long}y",),
        (f"{long}yy",),
        (f"{BEGINNING + 1} {long}",),
    ]
    assert len({_tag(key, *parts) for parts in texts} | {_tag(b"l" * 32, "ab", "c")}) == len(texts) + 1
    assert _tag(key, f"{long}y") == _tag(key, f"{long}z")
