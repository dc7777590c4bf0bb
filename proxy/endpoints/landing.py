"""``GET /``: the addresses that clients need."""

from __future__ import annotations

import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from proxy import __version__

_AUTHORITY = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")

HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}

PATHS = {
    "/compaction/": "requests, savings, and policies",
    "/v1/models": "the models that you can use",
    "/livez": "whether the process runs",
    "/readyz": "whether it takes requests, and problems it works around",
    "/metrics": "counters for Prometheus",
}


async def landing(request: Request) -> Response:
    origin = _origin(request)
    about = {
        "name": "compaction-proxy",
        "version": __version__,
        "base_url": f"{origin}/v1",
        "anthropic_base_url": origin,
        "paths": PATHS,
    }
    return Response(msgspec.json.encode(about), media_type="application/json", headers=HEADERS)


def _origin(request: Request) -> str:
    """Return scheme, host, and port as the client sees them. A ``Host`` that isn't a plain name is ignored."""
    host = request.headers.get("host", "")
    if not _AUTHORITY.fullmatch(host):
        address, port = request.scope.get("server") or ("localhost", None)
        host = (f"[{address}]" if ":" in address else address) + (f":{port}" if port else "")
    # Shown to the client that sent the header, and to nobody else.
    encrypted = request.headers.get("x-forwarded-proto", "").strip().lower() == "https"
    return f"{'https' if encrypted else request.url.scheme}://{host}"
