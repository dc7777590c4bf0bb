"""The command `dashboard`: a link to the pages of a running server."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from pathlib import Path

import click
import httpx

from proxy.access.admin import LINK_PATH, linked, newest_link
from proxy.config import load
from proxy.errors import ConfigurationError
from proxy.pipeline.snapshot import listening
from proxy.server.run import dashboard_address


def opened(config: Path | None, host: str | None, port: int | None) -> None:
    """Print the link, and open it if the output is a terminal on a display. Raises ``ConfigurationError``."""
    settings = listening(load(config, os.environ), host)
    page = dashboard_address(settings, settings.server.port if port is None else port)
    _require_running(page)
    link = newest_link(page) if linked(settings) else page
    if link is None:
        raise ConfigurationError(
            f"There is no link for {page} in {tempfile.gettempdir()}. "
            "Fix: run the command as the server's user, with its TMPDIR"
        )
    click.echo(f"Dashboard: {link}")
    click.echo("The link works once." if linked(settings) else "Sign in with a key. The configuration has only hashes.")
    windows = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "TERM_PROGRAM"))
    if sys.stdout.isatty() and windows:  # without windows, a browser would take over the terminal
        webbrowser.open(link)


def _require_running(page: str) -> None:
    address = page.removesuffix(LINK_PATH)
    try:
        httpx.get(f"{address}/livez", trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        raise ConfigurationError(
            f"No server answers at {address}. Fix: start it with compaction-proxy serve, or pass its --port"
        ) from error
