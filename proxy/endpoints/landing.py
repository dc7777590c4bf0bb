"""``GET /``: a short page that tells a person which address clients need."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from proxy import __version__

_AUTHORITY = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")

_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:42rem;margin:3rem auto;padding:0 1rem}"
    "code,pre{font-family:ui-monospace,monospace}"
    "pre{padding:.75rem;border:1px solid;overflow-x:auto}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "vary": "accept",
}

PATHS = {
    "/compaction/": "requests, savings, policies, and replay",
    "/v1/models": "the models that you can use",
    "/livez": "whether the process runs",
    "/readyz": "whether it takes requests, and problems it works around",
    "/metrics": "counters for Prometheus",
}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">
<title>compaction-proxy</title>
<style>{style}</style>
</head>
<body>
<h1>compaction-proxy {version}</h1>
<p>The proxy is running. It compacts conversations of three APIs: chat completions, Responses, and Messages.</p>
<p>For OpenAI-compatible clients:</p>
<pre>export OPENAI_BASE_URL={base}</pre>
<p>For clients of Anthropic's API, such as Claude Code:</p>
<pre>export ANTHROPIC_BASE_URL={origin}</pre>
<p>For clients that take the base URL in their code or settings, use the same values.</p>
<ul>
{paths}
</ul>
</body>
</html>
"""


async def landing(request: Request) -> Response:
    """Return the page as HTML to clients that accept it, such as browsers, and as JSON to all others."""
    origin = _origin(request)
    base = f"{origin}/v1"
    if "text/html" in request.headers.get("accept", ""):
        paths = "\n".join(
            f'<li><a href="{path}"><code>{path}</code></a>: {escape(purpose)}</li>' for path, purpose in PATHS.items()
        )
        page = _PAGE.format(
            style=_STYLE, version=escape(__version__), base=escape(base), origin=escape(origin), paths=paths
        )
        return Response(page, media_type="text/html", headers=HEADERS)
    about = {
        "name": "compaction-proxy",
        "version": __version__,
        "base_url": base,
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
