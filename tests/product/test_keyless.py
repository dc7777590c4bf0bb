"""Callers without any key: one shared tenant on a local machine, and no stored data on a public one."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.access.authenticator import Authenticator
from proxy.config import Settings
from proxy.store.interface import SHARED_TENANT, UNSTORED_TENANT
from tests.kit.scripted import behind, chat
from tests.kit.upstream import StandIn

WINDOW = 16_000


def asked(url: str, messages: list[Any], key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"model": "m", "messages": messages}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False, timeout=60)
    assert (answer.status_code, answer.headers["x-compaction"]) == (200, "compacted")
    return answer


@pytest.mark.parametrize("keyless", ["separate", "shared"])
def test_nothing_is_stored_for_nobody(keyless: str, tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW)
    profile = {"context_window": WINDOW, "tokenizer": "o200k_base"}
    with behind(upstream, tmp_path, profile=profile, auth={"keyless": keyless}) as url:
        messages = chat(9, 900)
        told = [asked(url, messages).headers["x-compaction-summary"] for _ in range(2)]
        sent = upstream.conversations[-1].raw
        assert asked(url, messages, "sk-own").headers["x-compaction-summary"] == "made"
        summaries = len(upstream.summaries)
        upstream.window = WINDOW // 2  # from here on it refuses what the proxy believes to fit
        retries = [asked(url, chat(6, 900)).headers["x-compaction-retries"] for _ in range(2)]
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as store:
        tenants = {tenant for (tenant,) in store.execute("SELECT DISTINCT tenant FROM entries")}
    if keyless == "separate":
        assert told == ["digest", "digest"]
        assert retries == ["1", "1"], "no limit is learned either"
        assert summaries == 1, "but the caller's with a key"
        assert b"compaction archive" not in sent
        assert not {SHARED_TENANT, UNSTORED_TENANT} & tenants
    else:
        assert told == ["made", "stored"]
        assert retries == ["1", "0"]
        assert SHARED_TENANT in tenants


@pytest.mark.parametrize(
    ("host", "keyless", "tenant"),
    [
        ("127.0.0.1", None, SHARED_TENANT),
        ("::1", None, SHARED_TENANT),
        ("localhost", None, SHARED_TENANT),
        ("0.0.0.0", None, UNSTORED_TENANT),  # noqa: S104 - a setting under test
        ("10.0.0.1", None, UNSTORED_TENANT),
        ("0.0.0.0", "shared", SHARED_TENANT),  # noqa: S104
        ("127.0.0.1", "separate", UNSTORED_TENANT),
    ],
)
def test_who_they_are(host: str, keyless: str | None, tenant: str) -> None:
    settings = Settings.model_validate({"server": {"host": host}, "auth": {"keyless": keyless}})
    assert Authenticator(settings).authenticate([]).tenant == tenant


def test_the_address_that_a_command_names_decides() -> None:
    settings = Settings.model_validate({"server": {"host": "127.0.0.1"}})
    assert Authenticator(settings.listening("0.0.0.0")).authenticate([]).tenant == UNSTORED_TENANT  # noqa: S104
    assert Authenticator(settings.listening(None)).authenticate([]).tenant == SHARED_TENANT
