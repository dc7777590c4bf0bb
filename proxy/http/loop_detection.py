"""Detect requests that return to the proxy because it is its own upstream, directly or through others."""

from __future__ import annotations

from starlette.types import Scope

from proxy.errors import LoopDetected
from proxy.http.headers import VIA
from proxy.http.request_body import header

_VIA = VIA.encode()

MOST_HOPS = 5
"""Instances of this proxy that one request may pass."""


def next_via(scope: Scope, instance: str) -> str:
    """Return the value of the header ``x-compaction-via`` for the next hop. Raises ``LoopDetected``."""
    before = header(scope, _VIA)
    if before is None:
        return instance
    hops = [hop.strip() for hop in before.split(",") if hop.strip()]
    if instance in hops or len(hops) >= MOST_HOPS:
        raise LoopDetected(
            "This request has been through this proxy before: an upstream's base_url leads back to it. "
            "Point base_url at the provider."
        )
    return ",".join([*hops, instance])
