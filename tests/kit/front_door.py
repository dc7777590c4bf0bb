"""One proxy for many policies, with the client's response and the upstreams' requests of each call.

    with front({"default": {}, "short": {"keep": {"messages": 2}}}, folder) as door:
        seen = door.ask(messages, policy="short")
        assert seen.messages[0] == messages[0]

The caller's key selects a policy, so policies share neither summaries nor learned limits.
"""

import contextlib
import hashlib
import json
import re
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from starlette.types import ASGIApp

from proxy.config import load
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from tests.kit.messages import assistant, call, result, system, user, words
from tests.kit.upstream import Received, Reply, Responder, StandIn, text_tokens

WINDOW = 16_000
HUGE = 1_000_000
"""Tokens: an upstream with this window refuses nothing."""

TAG = "conversation_summary"
ARCHIVE_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{20}(?![0-9a-f])")
WITHOUT_A_MODEL = "from the messages without a model"
"""In every digest."""

CALLERS = 16
"""With each policy."""

NEVER = {"tokens": 500_000}
"""A trigger that no test reaches."""


@dataclass(frozen=True)
class Seen:
    """One request from both ends: the proxy's answer, and what the upstream got on its account, in order.

    ``conversations`` are the requests that carried the conversation, retries included; ``summaries`` are the
    proxy's own.
    """

    response: httpx.Response
    conversations: tuple[Received, ...]
    summaries: tuple[Received, ...]

    @property
    def status(self) -> int:
        return self.response.status_code

    @property
    def headers(self) -> Mapping[str, str]:
        return self.response.headers

    @property
    def steps(self) -> list[str]:
        return [step for step in self.headers.get("x-compaction-steps", "").split(",") if step]

    @property
    def error(self) -> Any:
        return self.response.json()["error"]

    @property
    def body(self) -> dict[str, Any]:
        """The body of the last request that carried the conversation."""
        return self.conversations[-1].body

    @property
    def messages(self) -> list[Any]:
        return list(self.body["messages"])

    @property
    def text(self) -> str:
        return json.dumps(self.messages, ensure_ascii=False)

    @property
    def summary(self) -> str:
        (message,) = summary_messages(self.messages)
        return text_of(message)

    @property
    def asked(self) -> str:
        return "\n".join(text_of(message) for request in self.summaries for message in request.body["messages"])


class Front:
    """A running proxy, and the upstream behind it."""

    def __init__(self, url: str, upstream: StandIn, http: httpx.Client) -> None:
        self.url = url
        self.upstream = upstream
        self._http = http

    def ask(
        self, messages: Sequence[Any], policy: str = "default", *, model: str = "m", caller: int = 0, **fields: Any
    ) -> Seen:
        """Send a conversation. Callers of different numbers have the same policy and share nothing else."""
        return self.post({"model": model, "messages": list(messages), **fields}, policy, caller=caller)

    def post(self, body: Mapping[str, Any] | bytes, policy: str = "default", *, caller: int = 0) -> Seen:
        """Send a body; a mapping is escaped to ASCII, as Python's own ``json`` does."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        before = len(self.upstream.requests)
        headers = {"authorization": f"Bearer {key(policy, caller)}", "content-type": "application/json"}
        response = self._http.post(f"{self.url}/v1/chat/completions", content=raw, headers=headers)
        requests = self.upstream.requests[before:]
        return Seen(
            response,
            tuple(request for request in requests if not request.summary),
            tuple(request for request in requests if request.summary),
        )

    def archived(self, identity: str, policy: str = "default", *, caller: int = 0) -> list[Any]:
        headers = {"authorization": f"Bearer {key(policy, caller)}"}
        response = self._http.get(f"{self.url}/compaction/archive/{identity}", headers=headers)
        assert response.status_code == 200, response.text
        return list(response.json()["messages"])

    @contextlib.contextmanager
    def scripted(
        self, *, window: int | None = None, responder: Responder | None = None, summariser: Responder | None = None
    ) -> Iterator[None]:
        """The upstream with another window or other answers, for as long as the block runs."""
        upstream = self.upstream
        before = upstream.window, upstream.responder, upstream.summariser
        upstream.window = upstream.window if window is None else window
        upstream.responder = responder or upstream.responder
        upstream.summariser = summariser or upstream.summariser
        try:
            yield
        finally:
            upstream.window, upstream.responder, upstream.summariser = before


@contextlib.contextmanager
def front(
    policies: Mapping[str, Mapping[str, Any]],
    folder: Path,
    window: int = WINDOW,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> Iterator[Front]:
    """A proxy with these policies in front of an upstream that refuses nothing.

    Models: ``small`` has a window of 4,000 tokens, ``believed`` one of 64,000, ``strict`` wants alternation,
    ``gpt-5-mini`` thinks before it writes; any other one has ``window``. ``around`` wraps the upstream.
    """
    upstream = StandIn(window=HUGE, max_output=32_000)
    profile = {"context_window": window, "max_output_tokens": min(2_000, window // 4), "tokenizer": "o200k_base"}
    small = {**profile, "context_window": 4_000, "max_output_tokens": 1_000}
    wide = {**profile, "context_window": 64_000, "max_output_tokens": 16_000}
    with serve(around(upstream.app)) as url:
        settings = {
            "store": {"url": f"sqlite:///{folder}/store.db"},
            "upstreams": {"main": {"base_url": f"{url}/v1"}},
            "models": [
                {"match": "small", "upstream": "main", "profile": small},
                {"match": "believed", "upstream": "main", "profile": wide},
                {"match": "gpt-5-mini", "upstream": "main", "profile": wide},
                {"match": "strict", "upstream": "main", "profile": {**profile, "strict_alternation": True}},
                {"match": "*", "upstream": "main", "profile": profile},
            ],
            # Nothing is made ahead: each summary request belongs to the request that is being looked at.
            "policies": {name: {"prepare": None, **policy} for name, policy in policies.items()},
            "teams": {name: {"policy": name, "keys": _hashes(name)} for name in policies},
        }
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(settings))
        with serve(Proxy(load(file, {}))) as entrance, httpx.Client(trust_env=False, timeout=60) as http:
            yield Front(entrance, upstream, http)
    assert upstream.faults == [], "every request was well formed"


def key(policy: str, caller: int = 0) -> str:
    return f"sk-{policy}-{caller}"


def _hashes(policy: str) -> list[str]:
    secrets = (key(policy, caller).encode() for caller in range(CALLERS))
    return [f"sha256:{hashlib.sha256(secret).hexdigest()}" for secret in secrets]


def alone(section: str, trigger: int, **settings: Any) -> dict[str, Any]:
    """A policy in which one cheap stage works, from ``trigger`` tokens on, and nothing else."""
    others = {name: None for name in ("duplicates", "truncate_args", "evict_results", "media") if name != section}
    return {"trigger": NEVER, **others, section: {"trigger": {"tokens": trigger}, **settings}}


says = assistant


def calling(*calls: tuple[str, str, Mapping[str, Any]]) -> dict[str, Any]:
    """A message of the assistant's with calls: id, name and arguments of each."""
    return assistant(None, *(call(identity, name, **arguments) for identity, name, arguments in calls))


def look(identity: str, text: str, tool: str = "read_file") -> list[dict[str, Any]]:
    return [calling((identity, tool, {"path": f"src/{identity}.py"})), result(identity, text)]


def lines(count: int, seed: str = "line") -> str:
    """``count`` different lines of about ten tokens each."""
    return "\n".join(f"{seed} {number}: the value is {number * 7}" for number in range(count))


def talk(count: int, size: int, seed: str = "") -> list[Any]:
    """``count`` user messages and answers of ``size`` tokens each."""
    messages: list[Any] = []
    for number in range(count):
        messages.append(user(f"{seed}Question {number}: " + words(size, f"q{number}x")))
        messages.append(says(f"{seed}Answer {number}: " + words(size, f"a{number}x")))
    return messages


def long_talk(seed: str = "") -> list[Any]:
    """A conversation just over the trigger of a window of 16,000 tokens."""
    return [system("Be brief."), *talk(7, 1_000, seed), user("What now?")]


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def summary_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [message for message in messages if f"<{TAG}>" in text_of(message)]


def dropped(messages: Sequence[Any], seen: Seen) -> list[Any]:
    """Return the messages that the summary replaces. The conversation has one system message, at its beginning."""
    kept = len(seen.messages) - 2
    assert seen.messages[2:] == list(messages[-kept:]), "what is kept is kept as it came"
    return list(messages[1:-kept])


def quoted_users(summary: str) -> list[str]:
    return re.findall(r"<user_message>\n(.*?)\n</user_message>", summary, re.DOTALL)


def archive_id(text: str) -> str:
    (found,) = set(ARCHIVE_ID.findall(text))
    return str(found)


def numbers_before(word: str, text: str) -> list[int]:
    """Return the numbers before a word, as in ``1,204 lines``."""
    return [int(found.replace(",", "")) for found in re.findall(rf"(\d[\d,]*) {word}", text)]


def png(width: int = 1_024, height: int = 1_024) -> str:
    """The data URL of a picture: its header, and as many bytes as a small file has."""
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + struct.pack(">II", width, height)
    return "data:image/png;base64," + b64encode(header + bytes(range(256)) * 12).decode()


def picture(url: str | None = None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url or png()}}


def always(reply: Reply) -> Responder:
    return lambda body: reply


def once(first: Reply, then: Callable[[], Reply] = lambda: Reply(content="Done.")) -> Responder:
    """A responder that gives one answer first, and another one from then on."""
    answers = [first]
    return lambda body: answers.pop() if answers else then()


def tokens(text: str) -> int:
    return text_tokens(text)
