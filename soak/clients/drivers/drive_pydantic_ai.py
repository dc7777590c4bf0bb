"""Pydantic AI, with default settings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable
from typing import Any

from pydantic_ai import Agent
from soak_common import MODEL, SYSTEM, TOOLS, drive, question

provider = "anthropic" if os.environ["SOAK_API"] == "messages" else "openai"
agent = Agent(f"{provider}:{MODEL}", instructions=SYSTEM, tools=list(TOOLS.values()))
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
