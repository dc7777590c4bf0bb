"""A server with the part of S3's API that the archive uses, which fails on demand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any, Literal
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.server.loopback import serve

MISSING = "needs obstore: pip install 'obstore>=0.12'"
INSTALLED = importlib.util.find_spec("obstore") is not None

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "stand-in", "AWS_SECRET_ACCESS_KEY": "secret"}

Failure = Literal["", "refuses", "overloaded", "hangs", "lists nothing"]

PAGE = 50
"""Names per listing. S3 returns up to 1,000."""


class ObjectServer:
    """One bucket. ``calls`` lists the requests by method, ``LIST`` and ``DELETE+`` for several objects included."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.failure: Failure = ""
        self.calls: list[str] = []
        self.held = False
        """While this is set, the server receives writes and processes them later."""
        self.holding = 0
        self.endpoint = ""
        self.app = Starlette(
            routes=[Route("/bucket{path:path}", self.answer, methods=["GET", "PUT", "HEAD", "DELETE", "POST"])]
        )

    def raw(self) -> bytes:
        """Return the names and contents of all objects."""
        return b"\n".join(part for name, body in self.objects.items() for part in (name.encode(), body))

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        listing = request.method == "GET" and "list-type" in request.query_params
        self.calls.append("LIST" if listing else "DELETE+" if request.method == "POST" else request.method)
        while self.failure == "hangs":
            if await request.is_disconnected():
                return Response(status_code=503)
            await asyncio.sleep(0.01)
        if self.failure == "overloaded":
            return _xml("<Error><Code>SlowDown</Code></Error>", 503)
        signed = request.headers.get("authorization", "").startswith("AWS4-HMAC-SHA256 Credential=stand-in/")
        if self.failure == "refuses" or not signed:
            return _xml("<Error><Code>AccessDenied</Code></Error>", 403)
        name = unquote(request.scope["raw_path"].decode().partition("?")[0].removeprefix("/bucket")).lstrip("/")
        if listing and self.failure == "lists nothing":
            return _xml("<Error><Code>InternalError</Code></Error>", 500)
        if listing:
            return self._list(request.query_params)
        if request.method == "POST":
            return self._delete_several(body)
        return await self._object(request, name, body)

    async def _object(self, request: Request, name: str, body: bytes) -> Response:
        if request.method == "PUT":
            self.holding += self.held
            while self.held:  # noqa: ASYNC110 - a test sets it
                await asyncio.sleep(0.01)
            self.objects[name] = body
            return Response(headers={"etag": _tag(body)})
        if request.method == "DELETE":
            self.objects.pop(name, None)
            return Response(status_code=204)
        if name not in self.objects:
            return _xml("<Error><Code>NoSuchKey</Code></Error>", 404)
        found = self.objects[name]
        return Response(found, headers={"etag": _tag(found), "last-modified": formatdate(usegmt=True)})

    def _list(self, query: Any) -> Response:
        prefix, delimiter, start = query.get("prefix", ""), query.get("delimiter"), query.get("continuation-token", "")
        contents: list[str] = []
        prefixes: list[str] = []
        left = [name for name in sorted(self.objects) if name.startswith(prefix) and name > start]
        for name in left[:PAGE]:
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.append(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
                body = self.objects[name]
                contents.append(
                    f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified>"
                    f"<ETag>{_tag(body)}</ETag><Size>{len(body)}</Size></Contents>"
                )
        more = len(left) > PAGE
        token = f"<NextContinuationToken>{escape(left[PAGE - 1])}</NextContinuationToken>" if more else ""
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in dict.fromkeys(prefixes)
        )
        return _xml(
            f"<ListBucketResult><IsTruncated>{'true' if more else 'false'}</IsTruncated>"
            f"{''.join(contents)}{common}{token}</ListBucketResult>"
        )

    def _delete_several(self, body: bytes) -> Response:
        names = [element.text or "" for element in ElementTree.fromstring(body).iter() if element.tag.endswith("Key")]  # noqa: S314
        for name in names:
            self.objects.pop(name, None)
        gone = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        return _xml(f"<DeleteResult>{gone}</DeleteResult>")


def _tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _xml(text: str, status: int = 200) -> Response:
    return Response(f'<?xml version="1.0" encoding="UTF-8"?>{text}', status, media_type="application/xml")


@contextlib.contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Run a server as long as the block runs."""
    server = ObjectServer()
    with serve(server.app) as server.endpoint:
        try:
            yield server
        finally:
            server.failure, server.held = "", False
