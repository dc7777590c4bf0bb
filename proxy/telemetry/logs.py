"""Write logs to standard error: one JSON object per line, or readable lines on a terminal. Never prompts or keys.

An exception is logged with its type and traceback, and with its message only if that can't quote a request.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from typing import Any, Literal

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from proxy.telemetry.request_log import request_names

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

_frames = ExceptionDictTransformer(show_locals=False)


def configure(
    level: Literal["debug", "info", "warning", "error"] = "info", form: Literal["auto", "json", "text"] = "auto"
) -> None:
    """Set up logging for a serving process. Lines of libraries have the same format as the proxy's."""
    text = sys.stderr.isatty() if form == "auto" else form == "text"
    lowest = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        request_names,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _exception_text if text else structlog.processors.ExceptionRenderer(as_data),
    ]
    renderer = structlog.dev.ConsoleRenderer() if text else structlog.processors.JSONRenderer()
    libraries = logging.StreamHandler(sys.stderr)
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
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


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


def as_data(exc_info: ExcInfo) -> list[dict[str, Any]]:
    """Return an exception and its causes as data for a JSON line."""
    stacks = _frames(exc_info)
    silent = {type(error).__name__ for error in _all(exc_info[1]) if words_of(error) == LEFT_OUT}
    _silenced(stacks, silent)
    return stacks


def as_text(error: BaseException) -> str:
    """Return an exception and its causes as readable text."""
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


def _silenced(part: Any, silent: set[str]) -> None:
    """Remove the messages of some exception types from log data."""
    if isinstance(part, dict):
        if part.get("exc_type") in silent:
            part |= {"exc_value": LEFT_OUT, "exc_notes": []}
        for inner in part.values():
            _silenced(inner, silent)
    elif isinstance(part, list | tuple):
        for inner in part:
            _silenced(inner, silent)
