"""A stand-in for chat completions that follows a script."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp

from proxy.dialects.chat.alternation import NOTED
from soak.clients.programs import TASK
from tests.kit.agent_script import Script
from tests.kit.strict_template import StrictTemplate
from tests.kit.upstream import Received, Reply, StandIn

MAX_OUTPUT = 16_384


class StrictChat:
    """``StandIn`` with the names of the other APIs' stand-ins.

    ``alternate`` puts a strict chat template in front of it, and ``max_output`` is its largest output in tokens.
    """

    def __init__(self, window: int, *, script: Script, alternate: bool = False, max_output: int = MAX_OUTPUT) -> None:
        self._script = script
        self.chat = StandIn(window=window, max_output=max_output, responder=self._reply)
        self._template = StrictTemplate(self.chat.app) if alternate else None
        self.app: ASGIApp = self._template or self.chat.app

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
        orders = [] if self._template is None else [f"order: {' '.join(roles)}" for roles in self._template.refused]
        return [*(fault.message for fault in self.chat.faults), *orders]

    @property
    def refused(self) -> list[Received]:
        """Return the requests that the stand-in rejected."""
        return [received for received in self.chat.requests if received.status >= 400]

    def _reply(self, body: dict[str, Any]) -> Reply:
        messages = list(body["messages"])
        if len(messages) > 2 and messages[-1]["role"] == "user" and messages[-2].get("content") == NOTED:
            del messages[-2:]  # Claude Code's reminders follow some results
        newest = messages[-1]
        if newest["role"] == "tool":
            made = self._script(None, newest["tool_call_id"])
        else:
            made = self._script(_asked(newest["content"]), None)
        return Reply(content=made.text or None, tool_calls=made.calls)


def _asked(content: Any) -> str:
    """Return the client's newest text. A summary may be before it, and a system message behind it."""
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content or []]
    paragraphs = "\n\n".join(parts).split("\n\n")
    return next((one for one in reversed(paragraphs) if one.rstrip().endswith(TASK)), paragraphs[-1])
