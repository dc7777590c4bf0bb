"""LlamaIndex's ``OpenAIResponses``, with default settings."""

from __future__ import annotations

import os
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from soak_common import MODEL, SYSTEM, TOOLS, drive, question

tools = [FunctionTool.from_defaults(fn=each) for each in TOOLS.values()]
llm = OpenAIResponses(model=MODEL, api_base=os.environ["OPENAI_BASE_URL"])
history: list[Any] = [ChatMessage(role="system", content=SYSTEM)]


def turn(part: int) -> str:
    """Run the agent's loop on a question. Every second turn is streamed."""
    history.append(ChatMessage(role="user", content=question(part)))
    while True:
        if part % 2:
            answer: Any = llm.chat_with_tools(tools, chat_history=history)
        else:
            *_, answer = llm.stream_chat_with_tools(tools, chat_history=history)
        history.append(answer.message)
        calls = llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
        if not calls:
            return str(answer.message.content)
        for call in calls:
            output = str(TOOLS[call.tool_name](**call.tool_kwargs))
            extra = {"call_id": call.tool_id, "tool_call_id": call.tool_id}
            history.append(ChatMessage(role="tool", content=output, additional_kwargs=extra))


drive(turn)
