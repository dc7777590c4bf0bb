"""The section `log`: which lines the proxy writes to standard error, and their format."""

from __future__ import annotations

from typing import Literal

from proxy.config.fields import Section

Level = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "text"]
LoggedRequests = Literal["notable", "all", "none"]


class LogSettings(Section):
    """Log lines: names and figures, no content."""

    level: Level = "info"
    """The lowest level to log. Libraries never log below info, because their debug lines quote requests."""
    format: LogFormat = "auto"
    """json: one object per line. text: readable lines. auto: json unless standard error is a terminal."""
    requests: LoggedRequests = "notable"
    """Which requests get a line when they finish. notable: those that failed, or that the proxy changed, retried, or
    delayed."""
