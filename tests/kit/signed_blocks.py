"""On-demand compaction of the strict stand-in for ``/v1/messages``: signed blocks, and the rules for sending them.

See platform.claude.com/docs/en/build-with-claude/compaction-on-demand and compaction-thinking-blocks, September 2026.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.kit.message_checks import THINKING, Block, Message, Refused, blocks_of, merged

BETA = "compact-2026-09-04"

Failure = Literal["empty", "rejected", "overloaded", "hang"]
"""How a stand-in fails to compact: 200 without a result, 400 or 404, 503 or 529, or no response."""

_CONFLICTS = ("context_management", "stop_sequences", "output_format")
_LONGEST_INSTRUCTIONS = 16_384


@dataclass(frozen=True, slots=True)
class Summarized:
    """A signed block, the digest of the system prompt and the tools, and a running one of the summarized messages."""

    block: str
    fixed: str
    running: Any


class SignedBlocks:
    """The blocks that the stand-in has signed."""

    def __init__(self) -> None:
        self._known: dict[str, Summarized] = {}

    def forget(self) -> None:
        """Forget all blocks, so that their signatures aren't valid."""
        self._known.clear()

    def adopted(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[Summarized | None, list[Message]]:
        """Return the block at the start of a request, and the messages without it. Raises ``Refused``."""
        messages: list[Message] = body["messages"]
        places = [(n, p) for n, m in enumerate(messages) for p, b in enumerate(blocks_of(m)) if is_block(b)]
        if not places:
            return None, messages
        if BETA not in headers.get("anthropic-beta", ""):
            raise Refused("messages.{}.content.{}: Input tag 'compaction' doesn't match the tags".format(*places[0]))
        if len(places) > 1:
            raise Refused("messages: only one `compaction` block may be sent")
        if places != [(0, 0)]:
            raise Refused("messages: the `compaction` block must be the first block of the conversation")
        if any(edit["type"].startswith("compact_") for edit in (body.get("context_management") or {}).get("edits", [])):
            raise Refused("context_management: compaction can't run on a request with a signed block")
        block, *rest = blocks_of(messages[0])
        found = self._known.get(block.get("signature", ""))
        if found is None:
            raise Refused("messages.0.content.0: the `signature` of the `compaction` block is not valid")
        if found.block != _canonical(block):
            raise Refused("messages.0.content.0: the `compaction` block was modified")
        kept = [{**messages[0], "content": rest}] if rest else []
        return found, [*kept, *messages[1:]]

    def written(self, body: Mapping[str, Any], before: Summarized | None, messages: Sequence[Message]) -> Block:
        """Return a new block in place of all messages of a request."""
        running = _running(body, before)
        for message in merged(messages):
            running.update(_of_message(message))
        text = f"{len(messages)} messages are summarized here: " + " ".join(f"point{n}" for n in range(60))
        signature = hashlib.sha512(running.digest() + bytes([len(self._known) % 256])).hexdigest()
        block = {"type": "compaction", "content": text, "signature": signature}
        self._known[signature] = Summarized(_canonical(block), _fixed(body).hexdigest(), running)
        return block


def is_block(block: Mapping[str, Any]) -> bool:
    """Return whether a block is a compaction block."""
    return block["type"] == "compaction"


def check_request(headers: Mapping[str, str], body: Mapping[str, Any]) -> None:
    """Check a request for a block. Raises ``Refused``."""
    if BETA not in headers.get("anthropic-beta", ""):
        raise Refused(f"compaction: requires anthropic-beta: {BETA}")
    for name in _CONFLICTS:
        if body.get(name):
            raise Refused(f"{name}: can't be combined with compaction")
    output = body.get("output_config") or {}
    if output.get("format") or (output.get("task_budget") or {}).get("remaining"):
        raise Refused("output_config: can't be combined with compaction")
    if (body.get("tool_choice") or {}).get("type") in ("any", "tool"):
        raise Refused("tool_choice: can't be combined with compaction")
    if body["compaction"]["type"] != "summarize":
        raise Refused("compaction.type: Input should be 'summarize'")
    if len(body["compaction"].get("instructions", "")) > _LONGEST_INSTRUCTIONS:
        raise Refused("compaction.instructions: String should have at most 16384 characters")


def checkable(body: Mapping[str, Any], adopted: Summarized | None, messages: Sequence[Message]) -> dict[str, Any]:
    """Return a body for the checks of roles and results, with user messages in place of the block and the request."""
    shown = list(messages)
    if adopted is not None and (not shown or shown[0]["role"] == "assistant"):
        shown.insert(0, {"role": "user", "content": "summary"})
    if body.get("compaction") and shown[-1]["role"] == "assistant":
        shown.append({"role": "user", "content": "summarize"})
    return {**body, "messages": shown}


def answer(block: Block | None) -> dict[str, Any]:
    """Return the part of an answer with a block; without one if the summary failed."""
    cost = {"type": "compaction", "input_tokens": 1_000, "output_tokens": 100}
    usage = {"input_tokens": 0, "output_tokens": 0, "iterations": [cost]}
    return {"content": [block] if block else [], "stop_reason": "compaction" if block else "end_turn", "usage": usage}


def prompts(body: Mapping[str, Any], messages: Sequence[Message], adopted: Summarized | None = None) -> list[str]:
    """Return the digest of the prompt before each message, and of the whole prompt.

    Thinking and breakpoints aren't part of it. A block stands for the messages that it summarizes, if the system prompt
    and the tools are still the same.
    """
    running = _running(body, adopted)
    digests = [running.hexdigest()]
    for message in messages:
        running.update(_of_message(message))
        digests.append(running.hexdigest())
    return digests


def _running(body: Mapping[str, Any], adopted: Summarized | None) -> Any:
    running = _fixed(body)
    if adopted is not None and adopted.fixed == running.hexdigest():
        return adopted.running.copy()
    if adopted is not None:
        running.update(adopted.block.encode())
    return running


def _fixed(body: Mapping[str, Any]) -> Any:
    system = blocks_of({"content": body.get("system") or []})
    return hashlib.sha256(_canonical([system, body.get("tools")]).encode())


def _of_message(message: Message) -> bytes:
    blocks = [block for block in message["content"] if block["type"] not in THINKING]
    return _canonical([message["role"], blocks]).encode()


def _canonical(value: Any) -> str:
    def plain(part: Any) -> Any:
        if isinstance(part, list):
            return [plain(one) for one in part]
        if isinstance(part, dict):
            return {key: plain(one) for key, one in part.items() if key != "cache_control"}
        return part

    return json.dumps(plain(value), sort_keys=True)
