"""A stand-in for chat completions that follows a script."""

from __future__ import annotations

from typing import Any

from proxy.demo.replies import Reply
from proxy.demo.upstream import Received, StandIn
from tests.kit.agent_script import Script

MAX_OUTPUT = 16_384


class StrictChat:
    """The stand-in of ``proxy.demo``, with the names of the other APIs' stand-ins."""

    def __init__(self, window: int, *, script: Script) -> None:
        self._script = script
        self.chat = StandIn(window=window, max_output=MAX_OUTPUT, responder=self._reply)
        self.app = self.chat.app

    @property
    def requests(self) -> list[Received]:
        """Return all requests, in order."""
        return self.chat.requests

    @property
    def conversations(self) -> list[Received]:
        """Return the requests except those for summaries."""
        return self.chat.conversations

    @property
    def faults(self) -> list[str]:
        """Return the errors of malformed requests."""
        return [fault.message for fault in self.chat.faults]

    @property
    def refused(self) -> list[Received]:
        """Return the requests that the stand-in rejected."""
        return [received for received in self.chat.requests if received.status >= 400]

    def _reply(self, body: dict[str, Any]) -> Reply:
        newest = body["messages"][-1]
        if newest["role"] == "tool":
            made = self._script(None, newest["tool_call_id"])
        else:
            made = self._script(_text(newest["content"]), None)
        return Reply(content=made.text or None, tool_calls=made.calls)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])
