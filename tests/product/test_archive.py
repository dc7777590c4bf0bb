"""Test archived messages: their endpoint, the changes of a request, and the names that a prompt still has."""

import asyncio
import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import yaml
from starlette.types import Receive, Scope, Send

from proxy.config import load
from proxy.endpoints.records import diff_json
from proxy.pipeline.changes import read_prompt
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from proxy.store import open_store
from proxy.store.archive import Archive, Removed
from proxy.telemetry.record import RequestRecord
from tests.kit.messages import assistant, call, result, system, user, words
from tests.kit.records import records_in
from tests.kit.scripted import behind, chat, client, key_hash
from tests.kit.upstream import StandIn
from tests.kit.waiting import until
from tests.product.test_metrics import added, scrape, total

UPSTREAM = {"upstreams": {"main": {"base_url": "http://127.0.0.1:9/v1", "api_key": "sk-upstream"}}}
TEAMS: dict[str, Any] = {
    **UPSTREAM,
    "auth": {"mode": "keys"},
    "teams": {
        name: {"keys": [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}" for key in keys]}
        for name, keys in {"search": ("sk-search", "sk-search-2"), "ops": ("sk-ops",)}.items()
    },
}
OLD = (b'{ "role":"user",  "content":"\\u00e9\\/ 1" , "x":1.10}', '{"role":"assistant","content":"é 👋"}'.encode())
NEW = (b'{"role":"user","content":"two","big":1e400}',)
FIRST, SECOND = Removed("0123456789abcdef0123", OLD), Removed("f" * 20, NEW, "0123456789abcdef0123")


class Running:
    """A proxy, and a way to keep something in its archive as a request for chat would."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.url = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application; ``PUT /keep/TENANT`` keeps both entries."""
        if scope["type"] == "http" and scope["path"].startswith("/keep/"):
            self.proxy.service.stores.archive.keep(scope["path"].removeprefix("/keep/"), [FIRST, SECOND], 3600)
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.proxy(scope, receive, send)

    def keep(self, tenant: str) -> None:
        assert self.ask(f"/keep/{tenant}", method="PUT").status_code == 204

    def ask(self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> httpx.Response:
        with httpx.Client(trust_env=False, timeout=30) as http:
            return http.request(method, self.url + path, headers=headers)

    def entry(self, id: str, key: str | None = None) -> httpx.Response:
        return self.ask(f"/compaction/archive/{id}", {"authorization": f"Bearer {key}"} if key else None)


@contextlib.contextmanager
def running(folder: Path, settings: Mapping[str, Any]) -> Iterator[Running]:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"store": {"url": f"sqlite:///{folder}/store.db"}, **settings}))
    proxy = Running(Proxy(load(file, {})))
    with serve(proxy) as proxy.url:
        yield proxy


@pytest.fixture(scope="module")
def teams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("teams"), TEAMS) as proxy:
        proxy.keep("team:search")
        yield proxy


def error(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    value = answer.json()
    found: dict[str, Any] = value["error"]
    assert (set(value), set(found)) == ({"error"}, {"message", "type", "param", "code"})
    return found


def answered(answer: httpx.Response, id: str, messages: Sequence[bytes], *, complete: bool = True) -> None:
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert "no-store" in answer.headers["cache-control"]
    value = answer.json()
    assert {key: value[key] for key in value if key != "messages"} == {
        "object": "compaction.archive",
        "id": id,
        "complete": complete,
    }
    assert value["messages"] == [json.loads(message) for message in messages]
    assert b"[" + b",".join(messages) + b"]" in answer.content


def test_everything_up_to_a_place_comes_back_to_the_byte(teams: Running) -> None:
    answered(teams.entry(SECOND.id, "sk-search"), SECOND.id, [*OLD, *NEW])
    answered(teams.entry(FIRST.id, "sk-search"), FIRST.id, OLD)
    answered(teams.entry(FIRST.id, "sk-search-2"), FIRST.id, OLD)
    answered(teams.ask(f"/compaction/archive/{FIRST.id}?x=1", {"api-key": "sk-search"}), FIRST.id, OLD)


def test_another_team_finds_what_it_would_find_of_nothing(teams: Running) -> None:
    other, nothing = teams.entry(FIRST.id, "sk-ops"), teams.entry("0" * 20, "sk-ops")
    assert other.status_code == nothing.status_code == 404
    assert other.content == nothing.content
    told = error(other)
    assert (told["type"], told["code"]) == ("invalid_request_error", "not_found")
    for hint in ("expired", "key", "team"):
        assert hint in told["message"]
    assert "no-store" in other.headers["cache-control"]


@pytest.mark.parametrize(
    "id",
    ["", "x", FIRST.id[:-1], FIRST.id + "0", FIRST.id.upper(), FIRST.id + "/", "%20" + FIRST.id,
     "g" * 20, "٠" * 20, "..%2F" + FIRST.id, FIRST.id + "/messages", "%FF" * 20, "'; DROP TABLE entries; --"],
)  # fmt: skip
def test_what_is_no_id_is_told_so(teams: Running, id: str) -> None:
    answer = teams.entry(id, "sk-search")
    assert answer.status_code == 404
    assert error(answer)["code"] == "not_found"
    message = error(answer)["message"]
    assert message.startswith("This isn't an archive id. An archive id has 20 lowercase hexadecimal digits. ")
    assert "Copy the archive id from the note" in message


def test_without_teams_each_key_has_an_archive_of_its_own(tmp_path: Path) -> None:
    with running(tmp_path, UPSTREAM) as proxy:
        proxy.keep("key:" + hashlib.sha256(b"sk-one").hexdigest())
        answered(proxy.entry(SECOND.id, "sk-one"), SECOND.id, [*OLD, *NEW])
        for key in ("sk-two", None):
            assert proxy.entry(SECOND.id, key).status_code == 404
        proxy.keep("anonymous")
        answered(proxy.entry(SECOND.id), SECOND.id, [*OLD, *NEW])
        assert proxy.entry(SECOND.id, "sk-two").status_code == 404


def test_it_outlives_the_process_and_says_what_is_missing(tmp_path: Path) -> None:
    with running(tmp_path, TEAMS) as proxy:
        proxy.keep("team:search")
    with running(tmp_path, TEAMS) as proxy:
        answered(proxy.entry(SECOND.id, "sk-search"), SECOND.id, [*OLD, *NEW])
        with sqlite3.connect(tmp_path / "store.db") as db:
            db.execute("UPDATE entries SET expires = 1 WHERE key = ?", (FIRST.id,))
        db.close()
        answered(proxy.entry(SECOND.id, "sk-search"), SECOND.id, NEW, complete=False)
        assert proxy.entry(FIRST.id, "sk-search").status_code == 404


def test_what_waits_is_there_at_once_and_written_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, TEAMS) as proxy:
        put_many = proxy.proxy.service.stores.store.put_many

        async def slowly(entries: Any) -> None:
            await asyncio.sleep(0.5)
            await put_many(entries)

        monkeypatch.setattr(proxy.proxy.service.stores.store, "put_many", slowly)
        proxy.keep("team:search")
        answered(proxy.entry(SECOND.id, "sk-search"), SECOND.id, [*OLD, *NEW])
    with running(tmp_path, TEAMS) as proxy:
        answered(proxy.entry(SECOND.id, "sk-search"), SECOND.id, [*OLD, *NEW])


def test_a_store_that_cannot_be_read_is_no_expiry(tmp_path: Path) -> None:
    (tmp_path / "store.db").mkdir()
    with running(tmp_path, TEAMS) as proxy:
        answer = proxy.entry(FIRST.id, "sk-search")
    assert (answer.status_code, error(answer)["code"]) == (503, "archive_unavailable")
    assert answer.headers["retry-after"] == "5"
    assert "Try again" in error(answer)["message"]


def test_the_changes_of_a_request_can_be_read_from_the_archive(tmp_path: Path) -> None:
    messages = chat(30, 400)
    messages[-2]["content"] = words(9_000, "long")  # in the kept part, so it's shortened
    store = tmp_path / "compaction.db"
    upstream = StandIn(window=16_000)
    with behind(upstream, tmp_path, store={"url": f"sqlite:///{store}"}) as url:
        body = {"model": "gpt-5", "messages": messages}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=60)
    record = next(one for one in records_in(store) if one.id == answer.headers["x-compaction-id"])
    shown = asyncio.run(_changes(store, record))
    sent = next(one for one in upstream.requests if len(one.body["messages"]) > 2).body["messages"]
    rebuilt_before: dict[int, Any] = {}
    rebuilt_after: list[Any] = []
    for part in shown["changes"]:
        if "unchanged" in part:
            kept = messages[part["position"] : part["position"] + part["unchanged"]]
            rebuilt_after += kept
            rebuilt_before.update(enumerate(kept, part["position"]))
        else:
            rebuilt_after += part["after"]
            rebuilt_before.update(enumerate(part["before"], part["position"]))
    assert shown["complete"]
    assert rebuilt_after == sent
    assert [message for _, message in sorted(rebuilt_before.items())] == messages
    assert sum(part.get("summary", False) for part in shown["changes"]) == 1


async def _changes(store: Path, record: RequestRecord) -> dict[str, Any]:
    opened = open_store(f"sqlite:///{store}")
    try:
        prompt = await read_prompt(Archive(opened), record)
    finally:
        await opened.aclose()
    assert prompt is not None
    shown: dict[str, Any] = json.loads(msgspec.json.encode(diff_json(record.id, prompt)))
    return shown


ADMIN = "cp-admin"
FILLER = "plain words that are not names of anything "
IDENTIFIERS = [f"load_{number}_table_of_the_warehouse" for number in range(280)]
FILES = [f"src/part{number}/module{number}.py" for number in range(12)]
KINDS = ("files", "identifiers", "numbers", "errors")


def session(turns: int) -> list[Any]:
    """An agent's session that names files and identifiers at its beginning only."""
    messages = [system(), user("repair the loader.")]
    for number, file in enumerate(FILES):
        messages += [
            assistant(None, call(f"c{number}", path=file)),
            result(f"c{number}", f"{' '.join(IDENTIFIERS[number::12])} {FILLER * 60}"),
        ]
    for _ in range(turns):
        messages += [assistant(FILLER * 40), user(FILLER * 40)]
    return messages


@pytest.fixture(params=["archive", "no archive"])
def archived(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "archive")


@pytest.fixture
def place(tmp_path: Path, archived: bool) -> Iterator[tuple[str, StandIn]]:
    """The URL of a proxy, and its upstream."""
    upstream = StandIn(window=16_000)
    policy: dict[str, Any] = {} if archived else {"archive": None}
    with behind(upstream, tmp_path, policy=policy, admin={"keys": [key_hash(ADMIN)]}) as url:
        yield url, upstream


def asked(caller: openai.OpenAI, messages: list[Any]) -> str:
    answer = caller.chat.completions.with_raw_response.create(model="gpt-5", messages=messages)
    return str(answer.headers["x-compaction-id"])


def recorded(url: str, id: str) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=30) as admin:
        assert until(lambda: admin.get(f"/compaction/requests/{id}").status_code == 200)
        one: dict[str, Any] = admin.get(f"/compaction/requests/{id}").json()
        one["page"] = admin.get(f"/compaction/view/{id}").text
    return one


def test_a_compaction_states_the_names_that_its_prompt_still_has(place: tuple[str, StandIn], archived: bool) -> None:
    url, upstream = place
    messages = session(12)
    before = scrape(url)
    with client(url) as caller:
        small, large = asked(caller, messages[:2]), asked(caller, messages)
        sent = str(upstream.requests[-1].body["messages"])
        again = asked(caller, [*messages, assistant("done."), user(f"also {' '.join(IDENTIFIERS[:50])}.")])
    first, found = recorded(url, small), recorded(url, large)
    assert (first["verdict"], first["retention"]) == ("none", None)
    assert "Names in the removed part" not in first["page"]
    assert found["verdict"] == "compacted"
    retention = found["retention"]
    kept = sum(name in sent for name in IDENTIFIERS)
    gone = len(IDENTIFIERS) - kept
    assert 0 < kept < len(IDENTIFIERS)
    place_of_gone = {"archived": gone, "lost": 0} if archived else {"archived": 0, "lost": gone}
    assert retention["identifiers"] == {"kept": kept, **place_of_gone}
    files = sum(file.rpartition("/")[2] in sent for file in FILES)
    assert retention["files"]["kept"] == files > 0
    assert sum(retention["files"].values()) == len(FILES)
    named = sum(sum(retention[kind].values()) for kind in KINDS)
    assert retention["share"] == round((kept + files) / named, 4)
    assert "Names in the removed part" in found["page"]
    assert f'<td class="n">{kept}</td><td class="n">{gone if archived else 0}</td>' in found["page"]
    # A turn that reuses the checkpoint has its figures.
    assert recorded(url, again)["retention"] == retention
    assert until(lambda: total(added(url, before), "compaction_names_kept_ratio_count") == 2)
    increased = added(url, before)
    assert total(increased, "compaction_names_kept_ratio_count", policy="default") == 2
    assert total(increased, "compaction_names_kept_ratio_sum") == pytest.approx(2 * (kept + files) / named)


def test_a_shortened_result_counts_without_a_summary(place: tuple[str, StandIn], archived: bool) -> None:
    url, upstream = place
    messages = [system(), user("repair the loader.")]
    for number in range(3):
        lines = "\n".join(f"{name} = read() # {FILLER * 5}" for name in IDENTIFIERS[number:270:3])
        messages += [assistant(None, call(f"c{number}", path=FILES[number])), result(f"c{number}", lines)]
    messages += [assistant(FILLER * 30), user("go on."), assistant(FILLER * 30), user("go on.")]
    with client(url) as caller:
        id = asked(caller, messages)
    sent = str(upstream.requests[-1].body["messages"])
    found = recorded(url, id)
    assert (found["verdict"], found["summary"]["checkpoints"]) == ("compacted", 0)
    # The newest result stays whole, so its names don't count.
    shortened = [*IDENTIFIERS[0:270:3], *IDENTIFIERS[1:270:3]]
    kept = sum(name in sent for name in shortened)
    assert 0 < kept < len(shortened)
    gone = len(shortened) - kept
    place_of_gone = {"archived": gone, "lost": 0} if archived else {"archived": 0, "lost": gone}
    assert found["retention"]["identifiers"] == {"kept": kept, **place_of_gone}
