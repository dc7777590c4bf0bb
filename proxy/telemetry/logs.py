"""Write logs to standard error: one JSON object per line, or readable lines on a terminal. Never prompts or keys."""

from __future__ import annotations

import logging
import sys

import structlog

from proxy.telemetry.tracebacks import Formatter, as_data


def configure() -> None:
    """Set up logging for a serving process."""
    person = sys.stderr.isatty()
    libraries = logging.StreamHandler(sys.stderr)
    libraries.setFormatter(Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[libraries])
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.ExceptionRenderer(as_data),
            structlog.dev.ConsoleRenderer() if person else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # Write each line at once. With print, lines of several workers mix if output isn't buffered.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
