"""``GET /compaction/archive/{id}`` of a running proxy."""

import asyncio
import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.types import Receive, Scope, Send

from proxy.config import load
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from proxy.store.archive import Removed

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
