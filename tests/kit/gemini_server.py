"""A local stand-in for Gemini's API (``v1beta``). It rejects the same requests."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.kit.anthropic_server import LocalServer, Received, Script

PATH = re.compile(r"/v1beta/models/[\w.-]+:(generateContent|streamGenerateContent)")


class GeminiServer(LocalServer):
    """``script.blocks`` are Gemini's ``parts``; an error's kind is Google's ``status``."""

    key = "made-up-gemini-key"

    def __init__(self) -> None:
        super().__init__()
        self.script = Script(blocks=[{"text": "Hello there"}])

    async def answer(self, received: Received) -> Response:
        found = PATH.fullmatch(received.path)
        if found is None or (found[1] == "streamGenerateContent" and received.query != "alt=sse"):
            return self._error(404, "NOT_FOUND", f"no such path: {received.path}?{received.query}")
        if received.headers.get("x-goog-api-key") != self.key:
            return self._error(401, "UNAUTHENTICATED", "API key not valid")
        for complaint in complaints(received.body):
            return self._error(400, "INVALID_ARGUMENT", complaint)
        if self.script.error is not None:
            return self._error(*self.script.error)
        if found[1] == "streamGenerateContent":
            return StreamingResponse(self._stream(), media_type="text/event-stream", headers=self.script.headers)
        return JSONResponse(answer_of(self.script.blocks, last=True), headers=self.script.headers)

    def _error(self, status: int, kind: str, message: str) -> Response:
        body = {"error": {"code": status, "message": message, "status": kind}}
        return JSONResponse(body, status, headers=self.script.headers)

    async def _stream(self) -> AsyncIterator[bytes]:
        for index, part in enumerate(self.script.blocks):
            last = index == len(self.script.blocks) - 1 and self.script.cut is None
            yield b"data: " + json.dumps(answer_of([part], last=last)).encode() + b"\r\n\r\n"
        if self.script.cut == "connection":
            raise ConnectionResetError


def answer_of(parts: list[dict[str, Any]], *, last: bool) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    if last:
        candidate["finishReason"] = "STOP"
    usage = {"promptTokenCount": 31, "candidatesTokenCount": 5, "totalTokenCount": 36}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini-stand-in", "responseId": "r1"}


def complaints(body: dict[str, Any]) -> Iterator[str]:
    """Return the reason for which Gemini would reject a request. Turns of the same role may follow each other."""
    called: list[str] = []
    before = ""
    for content in body["contents"]:
        calls = [part["function_call"]["name"] for part in content["parts"] if "function_call" in part]
        answered = [part["function_response"]["name"] for part in content["parts"] if "function_response" in part]
        if content["role"] not in ("user", "model") or (not before and content["role"] != "user"):
            yield f"a turn of role {content['role']} after {before or 'nothing'}"
        if calls and before != "user":
            yield "a function call turn comes immediately after a user turn or after a function response turn"
        if answered != called:
            yield f"function calls {called} were answered with {answered}"
        called, before = calls, content["role"]
