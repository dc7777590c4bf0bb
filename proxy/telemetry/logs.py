"""Write logs to standard error: one JSON object per line, or readable lines on a terminal. Never prompts or keys."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

from proxy.telemetry.request_log import request_names
from proxy.telemetry.tracebacks import as_data, as_text


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
