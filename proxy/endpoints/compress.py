"""``POST /v1/compress`` and ``/v1/retrieve/{hash}``: compaction for gateways that send the request themselves.

LiteLLM's guardrail ``headroom``, Portkey, agentgateway, and Kong call these paths. A gateway sends messages and gets
them back compacted. Only summaries call an upstream, and only in the mode ``full``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog
from msgspec.structs import replace
from starlette.types import Receive, Scope

from proxy.compaction.stages.evict_results import ResultRules
from proxy.dialects.apis import DIALECTS, Dialect, body_of, recognized
from proxy.dialects.request import INLINE_BYTES, Request, check_values, fields_of, listed, value_of
from proxy.endpoints.conversations import Conversations, identity_headers, outcome_headers
from proxy.endpoints.paths import PREFIX
from proxy.endpoints.queries import parameters
from proxy.endpoints.records import ArchiveEndpoint
from proxy.errors import BadBody, MethodNotAllowed, Overloaded, ProxyError
from proxy.http.request_body import ClientLeft, Sent, answer_error, answer_json, leaving, read_body
from proxy.pipeline.exchange import Exchange, begin_request
from proxy.pipeline.job import CompactionInput
from proxy.pipeline.runtime import Runtime
from proxy.recall.search import original
from proxy.recall.tool import Query
from proxy.telemetry.record import record_of

log = structlog.get_logger(__name__)

COMPRESS = "/v1/compress"
RETRIEVE = "/v1/retrieve"

MODES = {"ccr": "ccr", "rows": "rows", "full": "full", "lossy_inline": "rows", "lossless_then_lossy": "rows"}
"""``rows`` keeps the number, order, and roles of messages. ``ccr`` also names archived originals. ``full`` may put a
summary in the place of messages. Other compressors have the last two."""

_UNCOUNTED = "The proxy can't count tokens at the moment. Send the messages unchanged."

ROW_TOKENS = 400
"""Most tokens of an old result. No summary replaces it, so it must get smaller than in a conversation with one."""

QUOTED = 16_000  # most characters of what a query for an archived original returns

QUERY_BYTES = 100_000

_Result = TypeVar("_Result")


class Task(NamedTuple):
    """A gateway's request: the body that its conversation has in an API. The first ``frozen`` messages stay."""

    dialect: Dialect
    body: bytes
    mode: str
    frozen: int

    @classmethod
    def read(cls, raw: bytes) -> Task:
        """Parse a body. Raises ``BadBody`` with the name of the wrong field."""
        fields = fields_of(raw)
        messages, model, name = (value_of(fields.get(field, b"")) for field in ("messages", "model", "api"))
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            raise BadBody(
                "'messages' must be a list of messages, as the API of the model takes them.", param="messages"
            )
        if not isinstance(model, str) or not model:
            raise BadBody("'model' must be the name of the model that gets the messages.", param="model")
        if name is not None and name not in DIALECTS:
            raise BadBody(f"'api' must be one of {', '.join(DIALECTS)}.", param="api")
        mode, frozen = _configured(value_of(fields.get("config", b"")))
        dialect = DIALECTS[name] if name else recognized(raw)
        tools, system = (
            bytes(fields[name]) if value_of(fields.get(name, b"")) else None for name in ("tools", "system")
        )
        body = body_of(dialect, bytes(fields["model"]), bytes(fields["messages"]), tools, system)
        return cls(dialect, body, mode, frozen)


def _configured(config: Any) -> tuple[str, int]:
    """Return the mode, and the number of messages that stay. Other settings belong to other compressors."""
    if config is not None and not isinstance(config, dict):
        raise BadBody('\'config\' must be an object, such as {"mode": "ccr"}.', param="config")
    config = config or {}
    mode, frozen = config.get("mode") or "ccr", config.get("frozen_message_count") or 0
    if not isinstance(mode, str) or mode not in MODES:
        raise BadBody(f"'config.mode' must be one of {', '.join(MODES)}.", param="config.mode")
    if not isinstance(frozen, int) or isinstance(frozen, bool) or frozen < 0:
        raise BadBody(
            "'config.frozen_message_count' must be a number of messages.", param="config.frozen_message_count"
        )
    if frozen and mode == "full":
        raise BadBody("Messages can't stay in the mode full. Use ccr or rows.", param="config.frozen_message_count")
    return MODES[mode], frozen


class Compress:
    """``POST /v1/compress``. ``conversations`` are the endpoints by their paths."""

    def __init__(self, service: Runtime, conversations: Mapping[str, Conversations]) -> None:
        self._service = service
        self._conversations = conversations

    async def __call__(self, scope: Scope, receive: Receive, send: Sent) -> None:
        exchanges: list[Exchange] = []
        try:
            if scope["method"] != "POST":
                raise MethodNotAllowed(f"This path doesn't support {scope['method']}. Use POST.")
            request = begin_request(self._service, scope, forwarded=False)
            with self._service.access.bodies.lease() as held:
                async with self._service.access.quotas.admit(request.caller):
                    limit = request.configuration.settings.server.body_limit
                    raw = await read_body(scope, receive, limit, held)
                    await check_values(raw)
                    task = await _worked(raw, partial(Task.read, raw))
                    del raw  # the task has a copy
                    record_of(scope).api = task.dialect.name
                    with leaving(receive, send):
                        now = asyncio.get_running_loop().time()
                        endpoint = self._conversations[PREFIX + task.dialect.path]
                        exchanges.append(await endpoint.exchange(request, [task.body], held, now))
                        body, headers = await self._compressed(endpoint, exchanges[0], task)
            await answer_json(send, body, headers)
        except ClientLeft:
            return
        except ProxyError as error:
            await answer_error(send, error)
        finally:
            for exchange in exchanges:
                await self._conversations[PREFIX + exchange.dialect.path].settle([exchange])

    async def _compressed(
        self, endpoint: Conversations, exchange: Exchange, task: Task
    ) -> tuple[bytes, list[tuple[str, str]]]:
        body, counter, tenant = exchange.body, exchange.counter, exchange.caller.tenant
        compactor, name = self._service.compactor, body.CONVERSATION
        if counter is None:
            raise Overloaded(_UNCOUNTED)
        if not body.units and bytes(fields_of(body.raw)[name]) != b"[]":
            problem = f"The messages aren't those of the API {task.dialect.name}. Name their API in 'api'."
            raise BadBody(problem, param="messages")

        def adapted(input: CompactionInput) -> CompactionInput:
            return input if task.mode == "full" else in_rows(input, archive=task.mode == "ccr")

        attempt = await endpoint.answering.compacted(exchange, adapted)
        outcome, hashes = attempt.outcome, list(attempt.outcome.archive)
        before = outcome.before or await compactor.size(body, counter, tenant)
        made, after = body, before
        if outcome.messages is not None and task.mode == "full":
            made = await _worked(body.raw, lambda: body.parse(body.rewritten(units=outcome.messages)))
        elif outcome.messages is not None:
            made = await _worked(body.raw, partial(_rows, body, outcome.messages, task.frozen))
            turns = zip(await compactor.turns(attempt.case), made.units, strict=True)
            hashes = [turn.facts.id for turn, unit in turns if turn.raw != unit]
        if made is not body:
            after = await compactor.size(made, counter, tenant)
        attempt.describe(exchange.record)
        result = {
            "messages": fields_of(made.raw)[name],
            "tokens_before": before,
            "tokens_after": after,
            "tokens_saved": before - after,
            "compression_ratio": round(after / before, 4) if before else 1.0,
            "transforms_applied": [] if made is body else list(outcome.steps),
            "ccr_hashes": hashes if attempt.case.rules.archive else [],
        }
        return msgspec.json.encode(result), [*outcome_headers(attempt, 0), *identity_headers(exchange)]


async def _worked(raw: bytes, work: Callable[[], _Result]) -> _Result:
    """Return the result of work on a body. That on a large one would hold up the event loop."""
    return work() if len(raw) <= INLINE_BYTES else await asyncio.to_thread(work)


def in_rows(input: CompactionInput, *, archive: bool) -> CompactionInput:
    """Return the input of a compaction that keeps the number, the order, and the roles of messages."""
    rules = input.rules
    bounds = dataclasses.replace(rules.bounds, messages=None)
    stages = [_tighter(stage) if isinstance(stage, ResultRules) else stage for stage in rules.stages]
    rules = dataclasses.replace(
        rules, rows=True, prepare=(), bounds=bounds, archive=rules.archive and archive, stages=tuple(stages)
    )
    return replace(input, rules=rules, writers=())


def _tighter(results: ResultRules) -> ResultRules:
    most = min(results.max_tokens, ROW_TOKENS)
    return dataclasses.replace(results, max_tokens=most, max_tokens_per_tool={}, exclude=())


def _rows(body: Request, units: list[bytes], frozen: int) -> Request:
    """Return a body with other units, but with its own first ``frozen`` messages; itself if messages would go."""
    name = body.CONVERSATION
    sent = msgspec.json.decode(fields_of(body.raw)[name], type=list[msgspec.Raw])
    made = msgspec.json.decode(fields_of(body.rewritten(units=units))[name], type=list[msgspec.Raw])
    if len(made) != len(sent):
        log.warning("compress.rows_changed", sent=len(sent), made=len(made))
        return body
    rows = listed([*sent[:frozen], *made[frozen:]])
    return body.parse(msgspec.json.encode({**fields_of(body.raw), name: rows}))


class Retrieve(ArchiveEndpoint):
    """``GET`` and ``POST /v1/retrieve/{hash}``: an archived original of the caller's tenant."""

    METHODS = ("GET", "POST")

    async def _answer(self, scope: Scope, receive: Receive, tenant: str) -> bytes:
        id: object = scope["path"].removeprefix(RETRIEVE).strip("/")
        query: object = parameters(scope["query_string"], ("query",)).get("query")
        if scope["method"] == "POST":
            with self._service.access.bodies.lease() as held:
                raw = await read_body(scope, receive, QUERY_BYTES, held)
            fields = fields_of(raw or b"{}")
            id, query = id or value_of(fields.get("hash", b"")), value_of(fields.get("query", b"")) or query
        if not isinstance(id, str) or not id:
            raise BadBody("'hash' must be a hash from 'ccr_hashes'.", param="hash")
        if query is not None and not isinstance(query, str):
            raise BadBody("'query' must be the words to look for.", param="query")
        found = await self.entry(tenant, id)
        text = await asyncio.to_thread(original, found.messages)
        if query:
            archive = self._service.archive_reader.conversation(tenant)
            try:
                text = await archive.answer(Query(query, id), len, QUOTED) or text
            finally:
                archive.close()
        return msgspec.json.encode({"hash": id, "original_content": text, "complete": found.complete})
