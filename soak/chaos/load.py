"""Send requests of all kinds, and check their responses."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any

import aiohttp

from soak.chaos.upstream import FAULT, Tally, digest_of

SESSIONS = 30
LONGEST = 60
"""Turns after which a conversation starts again with the same messages."""

KINDS = (("session", 45), ("small", 25), ("leave", 10), ("break", 14), ("other", 4), ("models", 2))
"""The kinds of requests, and their frequency in percent."""

_TEXT = "harbour ticket deploy orange window lantern gravel signal meadow copper letter engine"
WORDS = _TEXT.split()


class Load:
    """The clients of the proxy. Conversations repeat, so that the proxy's caches fill up."""

    def __init__(self, http: aiohttp.ClientSession, url: str, seed: int) -> None:
        """Create clients. ``http`` must not limit the number of connections."""
        self.tally = Tally()
        self._http = http
        self._url = url
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._turns = [self._random.randrange(LONGEST) for _ in range(SESSIONS)]
        self._free = [*range(SESSIONS)]

    async def one(self) -> None:
        """Send a request of a random kind and check its response."""
        names, weights = zip(*KINDS, strict=True)
        kind: str = self._random.choices(names, weights)[0]
        try:
            await getattr(self, f"_{kind}")()
        except Exception as error:  # noqa: BLE001 - any exception means a lost response
            self.tally.wrong.append(f"{kind}: {type(error).__name__}: {error}")
        self.tally.done[kind] += 1

    async def _session(self) -> None:
        if not self._free:
            return
        number = self._free.pop(self._random.randrange(len(self._free)))
        try:
            turn = self._turns[number]
            self._turns[number] = (turn + 1) % LONGEST
            messages = conversation(number, turn)
            await self._whole("session", messages, "tight" if number % 3 == 0 else "wide", stream=self._flip())
        finally:
            self._free.append(number)

    async def _small(self) -> None:
        messages = [{"role": "user", "content": f"turn {self._random.randrange(10_000)} of nothing much"}]
        await self._whole("small", messages, "wide", stream=self._flip())

    async def _other(self) -> None:
        body = self._random.randbytes(self._random.choice((0, 10, 3_000, 300_000)))
        async with self._post("/v1/embeddings", body, {"content-type": "application/octet-stream"}) as answer:
            value = await answer.json(content_type=None)
        if answer.status != 200 or value["digest"] != hashlib.blake2b(body, digest_size=20).hexdigest():
            self.tally.wrong.append(f"other: {answer.status} {value}")

    async def _models(self) -> None:
        async with self._http.get(f"{self._url}/v1/models") as answer:
            await answer.read()
        if answer.status >= 500:
            self.tally.wrong.append(f"models: {answer.status}")

    async def _leave(self) -> None:
        """Disconnect after a random time."""
        number = self._random.randrange(SESSIONS)
        messages = conversation(number, self._random.randrange(LONGEST))
        fault = self._random.choice(("", "slow", "silent:1"))
        try:
            async with asyncio.timeout(self._random.choice((0.001, 0.01, 0.05, 0.2, 0.8))):
                await self._ask("leave", messages, "wide", fault, stream=self._flip())
        except TimeoutError:
            return

    async def _break(self) -> None:
        """Have the upstream close the connection at a random byte, pause, or return an error."""
        number, stream = self._random.randrange(SESSIONS), self._flip()
        messages = conversation(number, self._random.randrange(8))
        at = self._random.randrange(3_000)
        fault = self._random.choice(
            (f"reset:{at}", f"reset:{at}", "reset before", "status:500", "status:429", "silent:2", "slow")
        )
        status, body = await self._ask("break", messages, "wide", fault, stream=stream)
        found = _after(fault, status, body, digest_of(messages[-1]["content"]), stream=stream)
        if found:
            self.tally.wrong.append(f"{fault}, stream {stream}: {found}: {status} {body[-300:]!r}")

    async def _whole(self, kind: str, messages: Sequence[Any], model: str, *, stream: bool) -> None:
        status, body = await self._ask(kind, messages, model, "", stream=stream)
        if status != 200 or content_of(body, stream=stream) != digest_of(messages[-1]["content"]):
            self.tally.wrong.append(f"{kind}, stream {stream}: {status} {body[-300:]!r}")

    async def _ask(
        self, kind: str, messages: Sequence[Any], model: str, fault: str, *, stream: bool
    ) -> tuple[int, bytes]:
        body = json.dumps({"model": model, "messages": messages, "stream": stream}).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer sk-soak"}
        if fault:
            headers[FAULT] = fault
        received = b""
        async with self._post("/v1/chat/completions", body, headers) as answer:
            if kind == "session":
                self.tally.compacted[answer.headers.get("x-compaction", "?")] += 1
            try:
                async for chunk in answer.content.iter_any():
                    received += chunk
            except aiohttp.ClientPayloadError:
                if not fault.startswith("reset"):
                    raise
                received += b"<broken off>"
        return answer.status, received

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> Any:
        return self._http.post(self._url + path, data=body, headers=headers)

    def _flip(self) -> bool:
        return self._random.random() < 0.5


def conversation(number: int, turn: int) -> list[dict[str, Any]]:
    """Return a conversation up to a turn. Equal arguments give equal messages."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are assistant {number}. Be brief."}]
    for at in range(turn + 1):
        chance = random.Random(number * 1_000 + at)  # noqa: S311 - no secret
        messages.append({"role": "user", "content": f"turn {at} of {number}: {_text(chance, 40, 160)}"})
        if at == turn:
            break
        if chance.random() < 0.3:
            call = {"id": f"call_{number}_{at}", "type": "function"}
            function = {"name": "read_file", "arguments": json.dumps({"path": f"src/{number}/{at}.py"})}
            messages.append({"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": _text(chance, 200, 1_500)})
        messages.append({"role": "assistant", "content": _text(chance, 40, 200)})
    return messages


def content_of(body: bytes, *, stream: bool) -> str | None:
    """Return the text of a response, or ``None`` if it's incomplete."""
    if not stream:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    events = _events(body)
    return _text_of(events) if events and events[-1] == b"[DONE]" else None


def _after(fault: str, status: int, body: bytes, expected: str, *, stream: bool) -> str | None:
    """Return the error in a response to an upstream failure, or ``None`` if it's correct."""
    name, _, argument = fault.partition(":")
    if name in ("silent", "slow"):
        return None if status == 200 and content_of(body, stream=stream) == expected else "incomplete response"
    if name == "status":
        return None if status == int(argument) and f"Status {argument}." in body.decode() else "another status"
    if status >= 500:
        return None if "error" in json.loads(body) else "the error isn't in OpenAI's format"
    if name == "reset before":
        return "a response although the upstream sent none"
    if not stream:
        # The head was already sent, so an incomplete body must end with a closed connection.
        whole = body.endswith(b"<broken off>") or content_of(body, stream=False) == expected
        return None if whole else "half a response"
    events = _events(body)
    if events and events[-1] == b"[DONE]":
        return None if _text_of(events) == expected else "another response"
    if not events or b'"error"' not in events[-1]:
        return "no error at the end"
    return None if expected.startswith(_text_of(events[:-1])) else "another text than the upstream's"


def _events(body: bytes) -> list[bytes]:
    return [event[6:] for event in body.split(b"\n\n") if event.startswith(b"data: ")]


def _text_of(events: Sequence[bytes]) -> str:
    chunks = [json.loads(event) for event in events if event != b"[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def _text(chance: random.Random, least: int, most: int) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(least, most)))
