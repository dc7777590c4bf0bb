"""LangChain: ``ChatOpenAI`` with ``use_responses_api=True``, or ``ChatAnthropic``."""

from __future__ import annotations

import functools
import operator
import os
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from soak_common import MODEL, SYSTEM, TOOLS, drive, question

tools: dict[str, Any] = {name: tool(each) for name, each in TOOLS.items()}
chat: Any
if os.environ["SOAK_API"] == "messages":
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(model_name=MODEL, timeout=None, stop=None)
else:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=MODEL, use_responses_api=True)
model = chat.bind_tools(list(tools.values()))
history: list[Any] = [SystemMessage(SYSTEM)]


def turn(part: int) -> str:
    """Run the agent's loop on a question. Every second turn is streamed."""
    history.append(HumanMessage(question(part)))
    while True:
        answer: Any = model.invoke(history) if part % 2 else functools.reduce(operator.add, model.stream(history))
        history.append(answer)
        if not answer.tool_calls:
            return str(answer.text)
        history.extend(tools[call["name"]].invoke(call) for call in answer.tool_calls)


drive(turn)
