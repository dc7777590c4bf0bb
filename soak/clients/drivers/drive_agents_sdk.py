"""The OpenAI Agents SDK, with default settings."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import Agent, Runner, function_tool, set_tracing_disabled
from soak_common import MODEL, SYSTEM, TOOLS, drive, question

set_tracing_disabled(True)
agent = Agent(name="engineer", instructions=SYSTEM, tools=[function_tool(each) for each in TOOLS.values()], model=MODEL)
history: list[Any] = []


async def turn(part: int) -> str:
    """Run the agent on a question. Every second turn is streamed."""
    history.append({"role": "user", "content": question(part)})
    if part % 2:
        result: Any = await Runner.run(agent, list(history))
    else:
        result = Runner.run_streamed(agent, list(history))
        async for _ in result.stream_events():
            pass
    history[:] = result.to_input_list()
    return str(result.final_output)


with asyncio.Runner() as loop:
    drive(lambda part: loop.run(turn(part)))
