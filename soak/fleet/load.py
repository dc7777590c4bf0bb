"""Agents on all three APIs, each request on a random replica, and the upstreams that judge their requests."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import httpx2
import openai

from proxy.server.loopback import serve
from soak.fleet.replicas import Balancer, Replica
from tests.kit import agent_sessions
from tests.kit.strict_messages import StrictMessages
from tests.kit.strict_responses import StrictResponses
from tests.kit.upstream import Reply, StandIn, summarise

WINDOW = 16_000
APIS = ("chat", "responses", "messages")
TURNS = 40
PAUSE = 0.01
"""Seconds before each chunk of a chat stream, so that replicas are killed during streams."""

SUMMARY_SECONDS = 0.4
"""Seconds that a summary takes, so that replicas are killed during summaries."""

CALM_PHASE = "no failure"

KEEPALIVE = 75
"""Seconds until the upstreams close an idle connection. As providers do, they leave that to the proxy."""

PROBE = "sk-probe"
"""The beginning of the keys of conversations that all replicas must send in the same bytes."""

LATEST = 3
"""Received requests that aren't judged yet, because they may be in progress."""


@dataclass
class Tally:
    """The agents' requests, by the phase in which each ended.

    ``times`` has their seconds, and ``team_times`` those of the team with limits. ``lost`` has errors on the
    connections of killed replicas, and ``wrong`` all other ones.
    """

    times: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lost: Counter[str] = field(default_factory=Counter)
    wrong: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    team_times: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    sessions: int = 0


class Upstreams:
    """The three stand-ins. ``judge`` counts and drops what they received."""

    def __init__(self) -> None:
        self.chat = StandIn(window=WINDOW, responder=_paused, summariser=self._slow)
        self.responses = StrictResponses(WINDOW)
        self.messages = StrictMessages(WINDOW)
        for strict in (self.responses, self.messages):
            strict.chat.summariser = self._slow
        self.faults: list[str] = []
        self._begun: dict[int, str] = {}
        """The phase in which the requests came that aren't judged yet, by their identity."""
        self._made: dict[str, str] = {}
        """The phase in which each summary was made first."""
        self.extra: Counter[str] = Counter()
        """Summaries that were made again, by phase. After a failure, it's the phase in which they were made first."""
        self.summarised = threading.Event()
        """Set when a summary begins."""
        self.probed: defaultdict[str, set[str]] = defaultdict(set)
        """The different prompts of each probe, by its key."""

    @contextlib.contextmanager
    def serving(self) -> Iterator[dict[str, str]]:
        """Serve on loopback, and yield the URL of each API."""
        with contextlib.ExitStack() as stack:
            apps = {"chat": self.chat.app, "responses": self.responses.app, "messages": self.messages.app}
            yield {api: stack.enter_context(serve(app, keepalive=KEEPALIVE)) for api, app in apps.items()}

    def _slow(self, body: dict[str, Any]) -> Reply:
        self.summarised.set()
        return dataclasses.replace(summarise(body), delay=SUMMARY_SECONDS)

    def judge(self, phase: str, *, all_of_them: bool = False) -> None:
        """Judge the received requests, except the latest ones."""
        for record in (self.chat, self.responses.chat, self.messages.chat, self.responses, self.messages):
            requests: list[Any] = record.requests
            count = len(requests) - (0 if all_of_them else LATEST)
            for received in requests[max(0, count) :]:
                self._begun.setdefault(id(received), phase)
            for received in requests[: max(0, count)]:
                came_in = self._begun.pop(id(received), phase)
                fault = getattr(received, "fault", None) or "; ".join(map(str, getattr(received, "faults", ())))
                if fault:
                    self.faults.append(f"{came_in}: {fault}")
                headers = dict(received.headers)
                caller = (headers.get("authorization") or headers.get("x-api-key") or "").removeprefix("Bearer ")
                if not received.summary:
                    if caller.startswith(PROBE):
                        self.probed[caller].add(json.dumps(received.body))
                    continue
                key = f"{caller} {json.dumps(received.body, sort_keys=True)}"
                if (first := self._made.get(key)) is not None:
                    self.extra[first if came_in == CALM_PHASE else came_in] += 1
                self._made.setdefault(key, came_in)
            del requests[: max(0, count)]


class Agents:
    """Threads with one session after the other."""

    def __init__(self, replicas: Sequence[Replica], number: int, phase: list[str]) -> None:
        self.tally = Tally()
        self._replicas = replicas
        self._phase = phase
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(APIS[index % len(APIS)], index), daemon=True)
            for index in range(number)
        ]

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work as long as the block runs, and then until the current sessions' next response."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            for thread in self._threads:
                thread.join(120)

    def _run(self, api: str, index: int) -> None:
        number = 0
        balancer = Balancer(self._replicas, index)
        # The two SDKs use different versions of the library.
        library: Any = httpx2 if api == "messages" else httpx
        with library.Client(transport=balancer.transport(library), timeout=60) as http:
            while not self._stopped.is_set():
                number += 1
                self._session(api, f"sk-{api}-{index}-{number}", http, balancer)

    def _session(self, api: str, key: str, http: Any, balancer: Balancer) -> None:
        turns = _session_of(api, key, http)
        tally = self.tally
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                next(turns)
            except StopIteration:
                tally.sessions += 1
                return
            except (openai.APIError, anthropic.APIError, httpx.HTTPError, httpx2.HTTPError, AssertionError) as error:
                phase, used = self._phase[0], balancer.used
                if not any(killed >= began - 0.1 for killed in used.killed):
                    tally.wrong[phase].append(f"{api}: {type(error).__name__}: {str(error)[:300]}")
                    return
                tally.lost[phase] += 1
                # The client sends the conversation again from its beginning. In chat it has the same bytes, so that all
                # its summaries must be found. In the other APIs, the upstream's ids are new.
                if api != "chat":
                    return
                turns = _session_of(api, key, http)
            finally:
                tally.times[self._phase[0]].append(time.monotonic() - began)


def _session_of(api: str, key: str, http: Any) -> Iterator[int]:
    if api == "messages":
        claude = anthropic.Anthropic(base_url="http://127.0.0.1:1", api_key=key, max_retries=0, http_client=http)
        return agent_sessions.messages_session(claude, TURNS, "messages")
    client = openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key=key, max_retries=0, http_client=http)
    if api == "chat":
        return agent_sessions.chat_session(client, TURNS, "chat")
    return agent_sessions.responses_session(client, TURNS, "items", "responses")


def _paused(body: dict[str, Any]) -> Reply:
    return dataclasses.replace(agent_sessions.chat_reply(body), pause=PAUSE)
