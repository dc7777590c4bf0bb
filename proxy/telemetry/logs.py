"""Write logs to standard error: one JSON object per line, or readable lines on a terminal. Never prompts or keys.

Each line names the current request. A finished request gets a line of its own if it's notable. An exception is logged
with its type and traceback, and with its message only if that can't quote a request.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import select
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

from proxy.constants import PICO
from proxy.telemetry.metrics import LOG_LINES_LOST
from proxy.telemetry.record import RequestRecord, current, shown_model

log = structlog.get_logger(__name__)

LEFT_OUT = "[left out: it could quote a request]"

# Built-in exceptions whose messages name types, files, and code. A ValueError or a KeyError quotes a value.
_SAFE_TO_QUOTE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    IndexError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
)

SLOW_MS = 1_000.0
"""A request is slow if the proxy takes longer than this, in addition to the body's arrival and the upstream's time."""

_CHANGED = frozenset({"refused", "failed", "compacted"})


class _Lines(io.TextIOBase):
    """A stream for log lines. It drops and counts a line that it can't write, so that logging never raises or blocks.

    The disk may be full, or the reader of the pipe may have stopped. ``stream`` is ``None`` if the process started with
    standard error closed.
    """

    _PATIENCE = 0.05  # seconds to wait for a reader that is behind. While it stays behind, lines are dropped at once

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._patience = self._PATIENCE

    def write(self, text: str) -> int:
        try:
            if self._stream is None:
                raise ValueError("standard error is closed")
            for piece in self._pieces(text, self._stream):
                self._stream.write(piece)
                self._stream.flush()
        except (OSError, ValueError):  # a closed stream raises ValueError
            LOG_LINES_LOST.inc()
        return len(text)

    def _pieces(self, text: str, stream: TextIO) -> Iterator[str]:
        """Yield the pieces to write at once. Raises ``BlockingIOError`` if there's no room for one.

        A pipe with some room may have too little for a long text, and would block in its middle.
        """
        try:
            is_pipe = stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
        except io.UnsupportedOperation:  # not a file of the system
            yield text
            return
        size = select.PIPE_BUF // (1 if text.isascii() else 4) if is_pipe else max(1, len(text))
        for start in range(0, len(text), size):
            if not select.select([], [stream], [], self._patience)[1]:
                self._patience = 0.0
                raise BlockingIOError("nobody reads standard error")
            self._patience = self._PATIENCE
            yield text[start : start + size]

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()


def configure(
    level: Literal["debug", "info", "warning", "error"] = "info", form: Literal["auto", "json", "text"] = "auto"
) -> None:
    """Set up logging for a serving process. Lines of libraries have the same format as the proxy's."""
    output = cast(TextIO, _Lines(sys.stderr))
    text = output.isatty() if form == "auto" else form == "text"
    lowest = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        request_names,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _exception_text,
    ]
    if text:
        shared.append(_printable)
    renderer = structlog.dev.ConsoleRenderer() if text else structlog.processors.JSONRenderer()
    libraries = logging.StreamHandler(output)
    libraries.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    # Debug lines of libraries quote requests.
    logging.basicConfig(level=max(lowest, logging.INFO), handlers=[libraries])
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(lowest),
        # Write each line at once. With print, lines of several workers mix if output isn't buffered.
        logger_factory=structlog.WriteLoggerFactory(output),
        cache_logger_on_first_use=True,
    )


def _printable(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Escape characters that could control a terminal. The renderer escapes those of values that aren't text."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in value)
    return event


def _exception_text(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Replace an exception by readable text without messages that could quote a request."""
    info = event.pop("exc_info", None)
    if info:
        error = info if isinstance(info, BaseException) else (info if isinstance(info, tuple) else sys.exc_info())[1]
        if error is not None:
            event["exception"] = as_text(error)
    return event


def words_of(error: BaseException) -> str:
    """Return an exception's message, or ``LEFT_OUT`` if it could quote a value."""
    safe = type(error).__module__ == "builtins" and isinstance(error, _SAFE_TO_QUOTE)
    return str(error) if safe else LEFT_OUT


def as_text(error: BaseException) -> str:
    parts = []
    for one in reversed(_all(error)):
        notice = f"{type(one).__qualname__}: {words_of(one)}"
        parts.append("".join(traceback.format_tb(one.__traceback__)) + notice)
    return "\nled to, or came with:\n".join(parts)


def unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an unhandled exception of a task. The event loop's own report would print the task's arguments."""
    error = context.get("exception")
    task = context.get("task") or context.get("future")
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    log.error(
        "task.crashed",
        # The rest of the message shows a function with its arguments.
        what=str(context.get("message", "")).partition(" callback ")[0],
        task=getattr(coroutine, "__qualname__", None),
        error=None if error is None else type(error).__name__,
        exc_info=error,
    )


def _all(error: BaseException) -> list[BaseException]:
    """Return an exception, its causes, and the members of groups, each once."""
    errors: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop(0)
        if any(one is earlier for earlier in errors):
            continue
        errors.append(one)
        before = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        waiting += [] if before is None else [before]
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    return errors


def request_names(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add the id, team, model, and upstream of the current request. Fields that the event has take precedence.

    Hide a model's name that doesn't look like one, because the client may send any text there.
    """
    record = current.get()
    if record is not None:
        for name, value in _names(record).items():
            event.setdefault(name, value)
    if (model := event.get("model")) is not None:
        event["model"] = shown_model(str(model))
    return event


class RequestLog:
    """Write a line for each finished request that is notable."""

    def __init__(self, requests: Callable[[], Literal["notable", "all", "none"]]) -> None:
        """``requests`` returns which requests get a line."""
        self._requests = requests

    def add(self, record: RequestRecord) -> None:
        if record.kind != "request" or (which := self._requests()) == "none":
            return
        if which == "notable" and not is_notable(record):
            return
        if record.status >= 500 or (record.error is not None and record.status < 400):
            log.warning("request.finished", **fields(record))
        else:
            log.info("request.finished", **fields(record))


def is_notable(record: RequestRecord) -> bool:
    """Return whether a request failed, or the proxy changed, retried, or delayed it, or would have compacted it."""
    return (
        record.status >= 400
        or record.error is not None
        or record.verdict in _CHANGED
        or record.forecast is not None
        or len(record.calls) > 1
        or is_slow(record)
    )


def is_slow(record: RequestRecord) -> bool:
    """Return whether the proxy delayed the start of the response. False if the upstream's time isn't known."""
    phases = record.phases
    begun = phases.get("first_byte")
    if begun is None or begun <= SLOW_MS or not record.calls:
        return False
    return begun - phases.get("body", 0.0) - sum(call.ms for call in record.calls) > SLOW_MS


def fields(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of the line for a request. Fields without a value are left out."""
    reason, usage, cost, error = record.reason, record.usage, record.cost, record.upstream_error
    stated = {
        **_names(record),
        "policy": record.policy,
        "api": record.api,
        "verdict": record.verdict,
        "trigger": reason and reason.trigger,
        "level_reached": reason and reason.level,
        "size": reason and reason.size,
        "tokens_before": record.before,
        "tokens_sent": record.sent,
        "tokens_forecast": record.forecast,
        "tokens_reported": usage and usage.input,
        "summary": record.summary,
        "cause": record.cause,
        "retries": record.retries,
        "upstream_error": error and error.stated,
        "attempts": [call.status or call.result for call in record.calls] or None,
        "status": record.status,
        "error": record.error,
        "phases": record.phases,
        "slow": is_slow(record) or None,
        "cost_usd": cost and cost.sent / PICO,
    }
    return {name: value for name, value in stated.items() if value is not None}


def _names(record: RequestRecord) -> dict[str, Any]:
    names = {
        "request": record.id,
        "team": record.team,
        "model": record.model,
        "upstream": record.upstream,
    }
    return {name: value for name, value in names.items() if value is not None}
