"""Request summaries from a model, through the same transports as every other request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from proxy.compaction.format import TextCounter
from proxy.config.upstreams import Api
from proxy.constants import UNDECODABLE
from proxy.dialects.conditions import NO_CONDITIONS, Conditions
from proxy.dialects.request import fields_of
from proxy.errors import UpstreamError
from proxy.http.headers import Credential, Headers
from proxy.overflow import Overflow, recognise
from proxy.summary.forms import CHAT, SummaryForm, read
from proxy.summary.quality import SummaryFailed, SummaryTooLong, Written
from proxy.telemetry.record import Trace, new_span, with_trace
from proxy.upstream.refusals import read as read_refusal
from proxy.upstream.registry import MISSING, denies_path
from proxy.upstream.traits import Edit, Memory, Place, apply, known
from proxy.upstream.transport import Outgoing, Transport

# Names of reasoning families, whose reasoning counts toward the output. Models that reason only on request (Claude,
# hybrid models) match if a gateway marks that in the name.
_REASONING = re.compile(
    r"(?<![a-z0-9])(?:gpt-[5-9]|o[1-9](?![a-z0-9.])|gpt-oss|codex-mini|deepseek[-.]?r\d|r1(?![a-z0-9.])|qwq|qvq|qwen-?3"
    r"|gemini-(?:2\.5|[3-9])|gemini-(?:flash|pro)-(?:lite-)?latest|grok-(?:3-mini|[4-9]|code)|magistral|minimax-m[1-9]"
    r"|glm-(?:4\.[5-9]|[5-9]|z1)|kimi-k2\.[5-9]|nemotron|seed-oss|ernie-x|hunyuan-(?:t1|a13b)|exaone-deep|mimo|phi-4-mini-flash)"
    r"|reason|think"
)
_NOT_REASONING = re.compile(r"non-?(?:reason|think)|no-?think|qwen-?3[^/]{0,40}instruct|chat-latest")
REASONING_TOKENS = 8_000
_REASONING_ROOMS = (REASONING_TOKENS, 4 * REASONING_TOKENS)

# A model may slightly exceed the word limit in the prompt. The proxy cuts the excess by whole lines.
OUTPUT_MARGIN = 1.5

_ANSWER_LIMIT = 4_000_000

_OK = 200
_EDITS = 10  # Retries in other words. A client may send several fields that an API refuses one at a time.
UNLIMITED = Edit("unlimited")  # Leaves out the output limit of a summary call. No other request loses its limit.

CONTINUED = Edit("continued")
"""Says that an upstream refuses transcripts, and that the conversation's own model writes notes instead."""

_INVALID_REQUEST = frozenset({400, 422})
_REFUSED = _INVALID_REQUEST | {500, 501}


Calls = Callable[[int, Callable[[], int], int, str | None], AbstractAsyncContextManager[Callable[..., None]]]
"""Begins a call, and records it at its end. Yields a function that reads the cost from the answer's bytes as they pass.

The arguments are the bytes of its body, a function that counts its prompt in tokens, the most tokens that it writes,
and the id of its span. Raises ``AllowanceSpent``.
"""

Way = tuple[SummaryForm, Transport]  # an API, and the transport for its path


@dataclass(slots=True, eq=False, repr=False)
class UpstreamSummaryModel:
    """A summary model at an upstream.

    ``input_limit`` and ``max_output`` are in tokens, and ``timeout`` in seconds per call. ``credential`` is the
    caller's key if the upstream has none of its own. After an overflow, ``on_overflow`` gets the overflow and the
    request's input and output tokens as counted here. ``calls`` charges and records each call.
    ``conditions`` returns the conditions of the client's request for a call by an API.
    ``traits`` remembers what the upstream takes, by ``place``. ``family`` and
    ``takes_effort`` are ``family`` and ``reasons`` of its ``Profile``.
    ``headers`` and ``query`` are those of the calls, by default the form's.
    ``form`` is the API to use. If the upstream doesn't have it, ``others`` follow, and ``on_missing`` gets its name.
    """

    transport: Transport
    model: str
    upstream: str
    count: TextCounter
    timeout: float
    input_limit: int | None = None
    max_output: int | None = None
    credential: Credential | None = None
    on_overflow: Callable[[Overflow, int, int], None] = lambda overflow, sent, output: None
    form: SummaryForm = CHAT
    others: Sequence[Way] = ()
    on_missing: Callable[[Api], None] = lambda api: None
    calls: Calls | None = None
    trace: Trace | None = None
    conditions: Callable[[str], Conditions] = lambda api: NO_CONDITIONS
    traits: Memory = field(default_factory=Memory)
    place: Place = ("", "", "")
    family: str = ""
    takes_effort: bool = False
    headers: Headers | None = None
    query: str = ""

    @property
    def name(self) -> str:
        """The upstream and the model."""
        return f"{self.upstream} {self.model}"

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int) -> Written:
        """Send a summary request. Raises ``SummaryFailed``, or ``SummaryTooLong`` if the input overflows.

        If the model spends its output on reasoning, ask again with more, and remember that.
        """
        while True:
            held = reasoning_room(self.traits.edits(self.place))
            most = output_limit(self.model, max_tokens, self.max_output, held)
            written = await self._asked(messages, most)
            rooms = (room for room in _REASONING_ROOMS if room > held)
            more = next((r for r in rooms if output_limit(self.model, max_tokens, self.max_output, r) > most), None)
            if more is None or not written.cut_in_thought:
                return written
            self.traits.learn(self.place, (Edit("reserved", "reasoning", more),))

    async def _asked(self, messages: list[dict[str, Any]], most: int) -> Written:
        """Send a request for at most ``most`` tokens, by the first API that the server has."""
        ways: list[Way] = [(self.form, self.transport), *self.others]
        missing: list[Api] = []
        size = lambda: sum(self.count(message["content"]) for message in messages)  # noqa: E731 - it's counted in a thread
        for way in ways:
            status, body = await self._taken(way, partial(self._body, way, messages, most), size, most)
            if status not in MISSING:
                for api in missing:
                    self.on_missing(api)
                break
            if self.model.encode() in body:
                break
            if denies_path(body, self.model):
                missing.append(way[0].api)
        overflow = recognise(status, body)
        if overflow is not None:
            self.on_overflow(overflow, self.count("\n".join(str(message["content"]) for message in messages)), most)
            raise SummaryTooLong("the summary model rejected the transcript as too long")
        return read(way[0], status, body)

    async def continued(self, body: bytes, tokens: int, most: int) -> Written:
        """Send a conversation's own request that ends in a request for notes. Raises ``SummaryFailed``.

        ``tokens`` is its size, ``most`` the output that it asks for.
        """

        def made(edits: Sequence[Edit]) -> dict[str, Any]:
            # Messages and other parts keep their bytes, so that the prompt cache serves them.
            parts = {
                name: value if bytes(value)[:1] in b"[{" else _decoded(value) for name, value in fields_of(body).items()
            }
            gone = self.form.limits if UNLIMITED in edits else ()
            return {name: value for name, value in parts.items() if name not in gone}

        status, answer = await self._taken((self.form, self.transport), made, lambda: tokens, most)
        if recognise(status, answer) is not None:
            raise SummaryFailed("the model rejected the conversation as too long")
        return read(self.form, status, answer)

    async def _taken(
        self, way: Way, made: Callable[[Sequence[Edit]], dict[str, Any]], size: Callable[[], int], most: int
    ) -> tuple[int, bytes]:
        """Send the body that ``made`` returns. If the server refuses its words, try other ones, and remember them."""
        tried: tuple[Edit, ...] = ()
        refused = b""
        for left in reversed(range(_EDITS + 1)):
            edits = (*self.traits.edits(self.place), *tried)
            sent = made(edits)
            apply(sent, edits)
            status, body = await self._send(
                way, msgspec.json.encode(sent), size, most, streams=bool(sent.get("stream"))
            )
            if not left or status not in _REFUSED or recognise(status, body) is not None:
                break
            asked = [one for one in read_refusal(body, sent) if apply(dict(sent), (one,))]
            if not asked and status in _INVALID_REQUEST and any(name.encode() in body for name in way[0].limits):
                asked = [UNLIMITED]  # the limit is too high for the model, or the server names the field differently
            asked = [one for one in asked if one not in tried and self.traits.helps(self.place, one)]
            if not asked:
                break
            tried, refused = (*tried, *asked), refused or body
        if status == _OK:
            self.traits.learn(self.place, tried)
        elif status in _REFUSED and body == refused:
            self.traits.acquit(self.place, tried)
        return status, body

    def _body(self, way: Way, messages: list[dict[str, Any]], most: int, edits: Sequence[Edit]) -> dict[str, Any]:
        fields = {name: _decoded(value) for name, value in self.conditions(way[0].api).fields.items()}
        body = {**fields, **way[0].body(self.model, messages, None if UNLIMITED in edits else most)}
        apply(body, known(self.family or self.model))
        return body

    async def _send(
        self, way: Way, body: bytes, size: Callable[[], int], most: int, *, streams: bool
    ) -> tuple[int, bytes]:
        """Send a body, charged to the team. ``size`` returns its tokens. Raises ``SummaryFailed``."""
        form, transport = way
        conditions = self.conditions(form.api)
        own, given, query = form.headers, conditions.headers, conditions.query
        if self.headers is not None:
            own, given, query = [], self.headers, self.query
        span = None if self.trace is None else new_span()
        request = Outgoing(
            body=body,
            model=self.model,
            stream=streams,
            headers=with_trace([*own, *(pair for pair in given if pair[0] not in dict(own))], self.trace, span),
            credential=self.credential,
            timeout=self.timeout,
            path=form.path,
            query=query,
            edits=self.traits.edits(self.place),
            family=self.family,
            reasons=self.takes_effort,
        )
        call = nullcontext() if self.calls is None else self.calls(len(body), size, most, span)
        chunks, length = list[bytes](), 0
        try:
            async with call as watch:
                request.watch = watch
                answer = await transport.send(request)
                try:
                    if watch is not None:
                        watch(answer)
                    async for chunk in answer.body:
                        chunks.append(chunk)
                        length += len(chunk)
                        if length > _ANSWER_LIMIT:
                            raise SummaryFailed("the response is too long")
                finally:
                    await answer.close()
        except UpstreamError as error:
            raise SummaryFailed(error.code) from error
        return answer.status, b"".join(chunks)


def output_limit(model: str, max_tokens: int, max_output: int | None, reasoning: int = 0) -> int:
    """Return the output limit to request for a summary of ``max_tokens``, with at least ``reasoning`` tokens more."""
    limit = int(max_tokens * OUTPUT_MARGIN) + max(reasoning, REASONING_TOKENS if reasons(model) else 0)
    return min(limit, max_output or limit)


def _decoded(value: msgspec.Raw) -> Any:
    """Return a field of a client's request, as bytes if it isn't valid JSON, such as with half of a surrogate pair."""
    try:
        return msgspec.json.decode(value)
    except UNDECODABLE:
        return value


def reasoning_room(edits: Sequence[Edit]) -> int:
    """Return the tokens of output that a model was found to need before it writes."""
    return next((edit.value for edit in edits if edit.kind == "reserved"), 0)


def reasons(model: str) -> bool:
    """Return whether a model's name, with any prefix or suffix, belongs to a reasoning family."""
    name = model.lower()
    return _REASONING.search(name) is not None and _NOT_REASONING.search(name) is None
