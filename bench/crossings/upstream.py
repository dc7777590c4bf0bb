"""The upstream, in a process of its own: ``python -m bench.crossings.upstream PORT SECONDS``.

It answers at once, and says which summary it read. The model ``SUMMARISER`` writes numbered summaries and takes so many
seconds for each.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys

import msgspec
from aiohttp import web

SUMMARISER = "bench-summariser"
SUMMARY_NUMBER = re.compile(rb"[Tt]his is summary number (\d+)\.")

_BODY_LIMIT = 64_000_000
_SUMMARY = "This is summary number {}. The task is to keep the service fast; files were read, nothing was changed."


class _Asked(msgspec.Struct):
    model: str


def create_app(seconds: float) -> web.Application:
    """The application; ``seconds`` is what a summary takes."""
    numbers = itertools.count(1)

    async def chat(request: web.Request) -> web.Response:
        body = await request.read()
        if msgspec.json.decode(body, type=_Asked).model == SUMMARISER:
            await asyncio.sleep(seconds)
            return _completion(_SUMMARY.format(next(numbers)))
        read = SUMMARY_NUMBER.search(body)
        return _completion(read[0].decode() if read else "No summary was read.")

    app = web.Application(client_max_size=_BODY_LIMIT)
    app.router.add_post("/v1/chat/completions", chat)
    return app


def _completion(text: str) -> web.Response:
    message = {"role": "assistant", "content": text}
    answer = {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "bench",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 40, "completion_tokens": 80, "total_tokens": 120},
    }
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


if __name__ == "__main__":
    web.run_app(create_app(float(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), print=None)
