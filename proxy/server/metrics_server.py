"""Serve metrics on an address of their own, and collect those of several workers."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from prometheus_client import start_http_server

from proxy.config import Loaded, Settings
from proxy.config.issues import Issue, error_text
from proxy.config.tree import line_of
from proxy.errors import ConfigurationError
from proxy.telemetry.exposition import FOLDER, registry

SETTING = ("metrics", "listen")


@contextlib.contextmanager
def folder_of_workers() -> Iterator[None]:
    """Create a private folder for the metrics of the workers to start, and remove it at the end.

    Raises ``ConfigurationError`` if that fails.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="compaction-proxy-metrics-")
    except OSError as error:
        raise ConfigurationError(
            error_text(
                f"cannot create a temporary folder for the metrics of the workers ({error.strerror})",
                "set TMPDIR to a folder that the proxy can write",
            )
        ) from error
    with folder as path:
        os.environ[FOLDER] = path
        yield


def serve_metrics(settings: Settings, loaded: Loaded | None) -> None:
    """Serve metrics on ``metrics.listen`` in a thread, if it's set. Raises ``ConfigurationError`` if that fails."""
    address = settings.metrics.address
    if address is None:
        return
    host, port = address
    try:
        start_http_server(port, host, registry())
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        fix = "use a free port of this machine, as in metrics: {listen: 127.0.0.1:9090}"
        text = error_text(f"cannot listen on {settings.metrics.listen} ({reason})", fix, ".".join(SETTING))
        located = [text] if loaded is None else loaded.sources.located([Issue(line_of(loaded.root, SETTING), text)])
        raise ConfigurationError("\n".join(located)) from error
