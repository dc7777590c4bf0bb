"""Test that the one-time link works once, in one of the workers, and only on loopback without admin keys."""

import time
from pathlib import Path

import httpx
import pytest

from proxy.access.admin import LINK, AdminLink, Admins, admin_link
from proxy.config import Settings
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from proxy.telemetry.record import RequestRecord, new_id
from tests.kit.configurations import loads
from tests.kit.program import call, write_config
from tests.kit.records import written
from tests.kit.scripted import key_hash

STATUS = "/compaction/status"


def test_the_link_starts_one_session_for_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = loads(f"store: {{url: 'sqlite:///{tmp_path}/store.db'}}\nauth: {{keyless: separate}}".encode(), {})
    record = RequestRecord(new_id(), time.time(), tenant="team:search")
    written(tmp_path / "store.db", [record])
    environ: dict[str, str] = {}
    with admin_link(settings, environ, "http://127.0.0.1:1/compaction/") as link:
        assert link is not None
        assert link.file.parent.stat().st_mode & 0o777 == 0o700
        token = link.address.partition("http://127.0.0.1:1/compaction/?token=")[2]
        monkeypatch.setenv(LINK, environ[LINK])
        with serve(Proxy(settings)) as first, serve(Proxy(settings)) as second:
            with httpx.Client(base_url=first, trust_env=False) as browser:
                wrong = browser.get("/compaction/?token=guess")
                assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
                path = f"/compaction/?token={token}"
                signed_in = browser.get(path)
                assert (signed_in.status_code, signed_in.headers["location"]) == (303, "/compaction/")
                cookie = signed_in.headers["set-cookie"]
                assert {"HttpOnly", "SameSite=Strict", "Path=/compaction"} <= set(cookie.split("; "))
                pair = {"cookie": cookie.split(";")[0]}
                assert token not in cookie
                answers = [httpx.get(url + path, trust_env=False) for url in (first, second)]
                assert [answer.status_code for answer in answers] == [401, 401]
                assert all(f"The next one is in {link.file}." in answer.text for answer in answers)
                # The same browser may open it again, for example after a reload.
                again = httpx.get(second + path, headers=pair, trust_env=False)
                assert (again.status_code, "set-cookie" in again.headers) == (303, False)
                following = link.address.rpartition("/")[2]
                assert token not in following
                assert httpx.get(f"{second}/compaction/{following}", trust_env=False).headers["set-cookie"] == cookie
            for url in (first, second):
                path = f"{url}/compaction/requests"
                answers = [httpx.get(path, headers=given, trust_env=False).json()["data"] for given in (pair, {})]
                assert [[one["id"] for one in data] for data in answers] == [[record.id], []]
                used = {**pair, "sec-fetch-site": "same-site"}
                assert httpx.get(f"{url}{STATUS}", headers=used, trust_env=False).status_code == 403
    assert LINK not in environ


@pytest.mark.parametrize(
    "text", ["server: {host: 0.0.0.0}", f"admin: {{keys: ['{key_hash('sk-admin')}']}}", "admin: {}"]
)
def test_there_is_no_link_on_other_addresses_or_with_admin_keys(text: str) -> None:
    environ = {LINK: "of:a:parent"}
    with admin_link(loads(text.encode(), {}), environ, "http://0.0.0.0:1/compaction/") as link:
        assert link is None
    assert environ == {}


def test_a_link_ends_with_a_reload_that_sets_admin(tmp_path: Path) -> None:
    link = AdminLink("session", tmp_path, "http://127.0.0.1:1/compaction/")
    cookie = [(b"cookie", b"other=1; compaction_admin=session")]
    settings = loads(f"admin: {{keys: ['{key_hash('sk-admin')}']}}".encode(), {})
    assert Admins(Settings()).sender(cookie, link)
    assert not Admins(settings).sender(cookie, link)
    assert not Admins(Settings()).sender([*cookie, (b"sec-fetch-site", b"same-site")], link)
    assert not Admins(Settings()).sender([*cookie, (b"x-api-key", b"sk-team")], link)
    assert not Admins(Settings()).sender([(b"cookie", b"compaction_admin=")], link)


def test_an_admin_key_is_a_hash_that_no_team_has(tmp_path: Path) -> None:
    found = call(tmp_path, "check", str(write_config({"admin": {"keys": ["sk-admin"]}}, tmp_path)))
    assert "must be the hash of a key" in found.stderr
    assert "sk-admin" not in found.stderr
    hash = key_hash("sk-admin")
    shared = {"admin": {"keys": [hash]}, "teams": {"search": {"keys": [hash]}}}
    found = call(tmp_path, "check", str(write_config(shared, tmp_path)))
    assert (found.returncode, "admin.keys also has this key" in found.stderr) == (1, True)
