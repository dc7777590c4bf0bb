"""The section `metrics`: where to serve the metrics."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema

from proxy.config.fields import Section, wrong

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9._-]*):([1-9][0-9]{0,4})")
_MOST_PORT = 65_535


def _address(value: object) -> str:
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[2]) > _MOST_PORT:
        raise wrong("must be an address and a port", fix="SETTING: 127.0.0.1:9090")
    return match[0]


Address = Annotated[
    str, PlainValidator(_address), WithJsonSchema({"type": "string", "pattern": f"^{_ADDRESS.pattern}$"})
]
"""A host name or IP address, and a port."""


class MetricsSettings(Section):
    """Where to serve the metrics."""

    listen: Address | None = None
    """The address and port of /metrics, as in 127.0.0.1:9090. Default: /metrics on the server's own port."""

    @property
    def address(self) -> tuple[str, int] | None:
        """Return the host and the port of a separate address, or ``None``."""
        if self.listen is None:
            return None
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)
