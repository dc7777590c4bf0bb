"""The upstream, in its own process: ``python -m bench.crossings.upstream PORT SECONDS``.

It responds at once, with the summary's number if the prompt has a summary. The model ``SUMMARIZER`` writes numbered
summaries and takes SECONDS for each.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys

import msgspec
from aiohttp import web

from bench.upstream import completion

SUMMARIZER = "bench-summarizer"
SUMMARY_NUMBER = re.compile(rb"[Tt]his is summary number (\d+)\.")

_BODY_LIMIT = 64_000_000
_SUMMARY = "This is summary number {}. The task is to keep the service fast; files were read, nothing was changed."


class _Asked(msgspec.Struct):
    model: str


def create_app(seconds: float) -> web.Application:
    """Return the application. A summary takes ``seconds``."""
    numbers = itertools.count(1)

    async def chat(request: web.Request) -> web.Response:
        body = await request.read()
        if msgspec.json.decode(body, type=_Asked).model == SUMMARIZER:
            await asyncio.sleep(seconds)
            return _completion(_SUMMARY.format(next(numbers)))
        read = SUMMARY_NUMBER.search(body)
        return _completion(read[0].decode() if read else "No summary was read.")

    app = web.Application(client_max_size=_BODY_LIMIT)
    app.router.add_post("/v1/chat/completions", chat)
    return app


def _completion(text: str) -> web.Response:
    return web.Response(body=completion(text), content_type="application/json")


if __name__ == "__main__":
    web.run_app(create_app(float(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), print=None)
