"""Format exceptions for the log: type and traceback, and the message only if it can't quote a request."""

from __future__ import annotations

import asyncio
import logging
import traceback
from typing import Any

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import ExcInfo

log = structlog.get_logger(__name__)

LEFT_OUT = "[left out: it could quote a request]"

# Built-in exceptions whose messages name types, files, and code. A ValueError or a KeyError quotes a value.
_SPEAKING = (
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


def words_of(error: BaseException) -> str:
    """Return an exception's message, or ``LEFT_OUT`` if it could quote a value."""
    own = type(error).__module__ == "builtins" and isinstance(error, _SPEAKING)
    return str(error) if own else LEFT_OUT


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


class Formatter(logging.Formatter):
    """Formats log lines of libraries and their exceptions."""

    def formatException(self, ei: Any) -> str:
        """Format without messages that could quote a request."""
        return as_text(ei[1])


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
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop(0)
        if any(one is known for known in found):
            continue
        found.append(one)
        before = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        waiting += [] if before is None else [before]
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    return found


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
