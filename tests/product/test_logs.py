"""Test the log lines of a running server by sending requests through it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from proxy.server.loopback import serve
from tests.kit.messages import assistant, call, result, system, user, words
from tests.kit.program import program, write_config
from tests.kit.scripted import PROFILE, key_hash
from tests.kit.upstream import Reply, StandIn, ToolCall

CANARY = "canary-7f3a91"
KEY = f"sk-{CANARY}-caller"
ERROR = {"error": {"message": f"no: {CANARY}", "type": "invalid_request_error"}}
REPLIES = {
    "wrong-key": Reply(status=401, error=ERROR),
    "missing": Reply(status=404, error=ERROR),
    "limited": Reply(status=429, error=ERROR),
    "broken": Reply(content=f"{CANARY} " * 9, break_after=3),
    "tool": Reply(tool_calls=(ToolCall("call_1", "read_file", json.dumps({"path": CANARY})),)),
}


def conversation(seed: str) -> list[Any]:
    turns = [
        user(f"{CANARY} {words(400, seed)}"),
        assistant(None, call("call_0", path=CANARY)),
        result("call_0", CANARY),
    ]
    return [system(CANARY), *turns, *(user(f"{n} {words(900, seed)}") for n in range(20)), user(f"{CANARY}?")]


def answer(body: Mapping[str, Any]) -> Reply:
    return REPLIES.get(body["model"], Reply(content=CANARY))


def settings(upstream: str) -> dict[str, Any]:
    return {
        "log": {"level": "debug"},
        "auth": {"mode": "keys"},
        "upstreams": {
            "main": {"base_url": f"{upstream}/v1", "api_key": f"sk-{CANARY}-main"},
            "down": {"base_url": "http://127.0.0.1:1/v1", "api_key": f"sk-{CANARY}-down"},
        },
        "models": [
            {"match": "down", "upstream": "down", "profile": PROFILE},
            {"match": "wide", "upstream": "main", "profile": {**PROFILE, "context_window": 400_000}},
            {"match": "*", "upstream": "main", "profile": PROFILE},
        ],
        "policies": {"default": {}, "watching": {"mode": "shadow"}},
        "teams": {
            "blue": {"keys": [key_hash(KEY)]},
            "red": {"policy": "watching", "keys": [key_hash(f"{KEY}-red")]},
        },
    }


def test_the_log_explains_each_notable_request_without_content(tmp_path: Path) -> None:
    upstream = StandIn(responder=answer, summariser=lambda body: Reply(status=500, error=ERROR))
    small = [user(f"{CANARY}!")]
    ids = {}
    with (
        serve(upstream.app) as address,
        program(write_config(settings(address), tmp_path)) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):

        def send(name: str, model: str, messages: list[Any], key: str = KEY, *, stream: bool = False) -> None:
            body = {"model": model, "messages": messages, "stream": stream, "user": CANARY}
            got = client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
            ids[name] = got.headers["x-compaction-id"]

        for name in ("fine", *REPLIES, "down", f"tell me {CANARY}"):
            send(name, name, small, stream=name == "broken")
        send("refused", "fine", small, f"{KEY}-unknown")
        send("compacted", "gpt-5", conversation("c"))
        send("shadow", "gpt-5", conversation("s"), f"{KEY}-red")
        send("overflow", "wide", conversation("o"))
    written = server.log.read_text()
    assert CANARY not in written
    (link,) = (line for line in written.splitlines() if not line.startswith("{"))
    assert link.startswith("Dashboard: "), "the only line that isn't a log line, and it goes to stdout"
    assert "token=" not in written, "the log may be collected, and its first reader would be administrator"
    assert written.index(link) > written.index("Application startup complete"), "it's the last line of the start"
    lines = [json.loads(line) for line in written.splitlines() if line != link]
    finished = [line for line in lines if line["event"] == "request.finished"]
    by_name = {name: line for name, id in ids.items() for line in finished if line["request"] == id}
    assert len(finished) == len(by_name)
    assert ids.keys() - by_name.keys() == {"fine", "tool", f"tell me {CANARY}"}, "these aren't notable"
    for name, line in by_name.items():
        assert line["api"] == "chat", name
        assert "total" in line["phases"], name
        if name != "refused":
            wanted = ("red" if name == "shadow" else "blue", "down" if name == "down" else "main")
            assert (line["team"], line["upstream"]) == wanted, name
            assert line["model"], name
    shown = {
        name: (one["status"], one["level"], one.get("attempts"), one.get("error")) for name, one in by_name.items()
    }
    assert shown["wrong-key"] == (401, "info", [401], None)
    assert shown["missing"][:3] == (404, "info", [404])
    assert shown["limited"][:3] == (429, "info", [429])
    assert shown["broken"] == (200, "warning", [200], "upstream_interrupted")
    assert shown["down"] == (502, "warning", ["upstream_unreachable"], "upstream_unreachable")
    assert shown["refused"] == (401, "info", None, "invalid_api_key")
    compacted, shadow, overflow = by_name["compacted"], by_name["shadow"], by_name["overflow"]
    assert (compacted["verdict"], compacted["trigger"]) == ("compacted", "fraction")
    assert compacted["size"] >= compacted["level_reached"]
    assert compacted["tokens_before"] > compacted["tokens_sent"]
    assert (compacted["summary"], compacted["cause"]) == ("digest", "failed")
    assert (shadow["verdict"], shadow["policy"]) == ("shadow", "watching")
    assert shadow["tokens_forecast"] < shadow["tokens_before"]
    assert (overflow["trigger"], overflow["attempts"], overflow["retries"]) == ("overflow", [400, 200], 1)
    events = {(line["event"], line.get("request")): line for line in lines}
    interrupted = events["upstream.interrupted", ids["broken"]]
    assert (interrupted["team"], interrupted["model"], interrupted["upstream"]) == ("blue", "broken", "main")
    assert events["summary.failed", ids["compacted"]]["team"] == "blue"
    learned = events["limit.learned", ids["overflow"]]
    assert (learned["upstream"], learned["model"], learned["team"], learned["source"]) == (
        "main",
        "wide",
        "blue",
        "refusal",
    )
    assert events["upstream.responded", ids["wrong-key"]]["status"] == 401
    (start,) = (line for line in lines if line["event"] == "server.started")
    assert start["address"] == f"127.0.0.1:{server.port}"
    assert start["policies"] == {"enforce": 1, "shadow": 1}
    assert (start["teams"], start["workers"], start["upstreams"]["down"]) == (2, 1, "127.0.0.1:1")
    assert start["files"] == [str(tmp_path / "config.yaml")]
    running = [line for line in lines if "Application startup complete" in line["event"]]
    assert [line["logger"] for line in running] == ["uvicorn.error"]
