"""Pydantic AI, with default settings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable
from typing import Any

from pydantic_ai import Agent
from soak_common import MODEL, SYSTEM, drive, found, question

provider = "anthropic" if os.environ["SOAK_API"] == "messages" else "openai"
agent = Agent(f"{provider}:{MODEL}", instructions=SYSTEM)


@agent.tool_plain
def read(target: str) -> str:
    """Read a file."""
    return found("read", target)


@agent.tool_plain
def search(target: str) -> str:
    """Search a file."""
    return found("search", target)


@agent.tool_plain
def run(target: str) -> str:
    """Run a file."""
    return found("run", target)


history: list[Any] = []


async def turn(part: int) -> str:
    """Run the agent on a question. Every second turn is streamed."""
    # `run_stream` would end at the first text, although calls follow it.
    handler = None if part % 2 else drained
    result = await agent.run(question(part), message_history=history, event_stream_handler=handler)
    history[:] = result.all_messages()
    return str(result.output)


async def drained(_: Any, events: AsyncIterable[Any]) -> None:
    """Read the events of a streamed answer."""
    async for _ in events:
        pass


with asyncio.Runner() as loop:
    drive(lambda part: loop.run(turn(part)))
