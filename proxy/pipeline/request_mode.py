"""Read from a request its mode, and whether its client compacts its own conversations."""

from __future__ import annotations

from typing import Literal

from starlette.types import Scope

from proxy.access.authenticator import Caller
from proxy.errors import BadBody
from proxy.http.request_body import header
from proxy.pipeline.context import ConversationContext
from proxy.upstream.transport import CHAT_PATH

Mode = Literal["enforce", "shadow", "off"]

_COMPACTING_AGENTS = ("claude-cli", "claude-code", "codex")
"""The beginnings of user agents of clients that compact their own conversations."""


def mode_of(scope: Scope, caller: Caller) -> Mode:
    """Return the policy's mode, or the mode in the request header ``x-compaction`` if the policy allows the header.

    The header can only restrict the policy: from ``enforce`` to ``shadow``, and from any mode to ``off``. Raises
    ``BadBody`` for any other value.
    """
    policy = caller.policy
    asked = (header(scope, b"x-compaction") or "").strip().lower()
    if not asked or not policy.allow_header:
        return policy.mode
    if asked == "off":
        return "off"
    if asked == "shadow":
        return "off" if policy.mode == "off" else "shadow"
    raise BadBody("The header x-compaction takes 'off' or 'shadow'. Correct it, or leave it out.")


def compacts_itself(context: ConversationContext) -> bool:
    """Return whether the client compacts its conversations, and the policy leaves it to the client."""
    if context.dialect.path == CHAT_PATH or context.caller.policy.self_compacting != "late":
        return False
    agent = (header(context.scope, b"user-agent") or "").lower()
    return agent.startswith(_COMPACTING_AGENTS)
