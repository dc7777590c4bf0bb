"""LangChain on the same conversations. Runs in its own environment, which has nothing of the project's but this folder.

Reads a job per line of standard input, writes an outcome per line of standard output, both JSON; the first line that
is written says which versions answer. Fields of a job: ``method`` (a key of ``METHODS``), ``messages``, ``ends`` (how
many messages each request has), ``window``, ``summariser``, ``summary_tokens``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import tiktoken
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    RemoveMessage,
    convert_to_messages,
    convert_to_openai_messages,
)
from langchain_core.messages.utils import count_tokens_approximately, trim_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.runtime import Runtime

from bench.quality.summariser import SUMMARISERS

Job = dict[str, Any]

TRIGGER = 0.85
"""Of the window: the share that LangChain's and DeepAgents' documentation use, and the project's default."""

_ENCODING = tiktoken.get_encoding("o200k_base")
# What the default prompt has before the conversation, and after it.
_BEFORE, _AFTER = "Messages to summarize:\n", "\n</messages>"


def _count(text: str) -> int:
    return len(_ENCODING.encode(text, disallowed_special=()))


class _Model(BaseChatModel):
    """A chat model that is a function. Notes down what it read."""

    summariser: str
    summary_tokens: int
    reads: list[int]

    @property
    def _llm_type(self) -> str:
        return "bench"

    def _generate(self, messages: list[BaseMessage], *args: Any, **more: Any) -> ChatResult:
        prompt = "\n".join(message.text for message in messages)
        self.reads.append(_count(prompt))
        material = prompt.split(_BEFORE, 1)[1].rsplit(_AFTER, 1)[0]
        notes = SUMMARISERS[self.summariser](material, self.summary_tokens, _count)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(notes))])


def _middleware(job: Job, reads: list[int], **settings: Any) -> Iterator[list[BaseMessage]]:
    """As in an agent: the middleware sees the state before each call of the model, and may replace it.

    The system prompt is no part of the state. ``settings`` go beyond the defaults.
    """
    model = _Model(
        summariser=job["summariser"],
        summary_tokens=job["summary_tokens"],
        reads=reads,
        profile={"max_input_tokens": job["window"]},
    )
    # pydantic may have copied the list
    model.reads = reads
    middleware = SummarizationMiddleware(model, trigger=("fraction", TRIGGER), **settings)
    messages = _converted(job)
    start = next(i for i, message in enumerate(messages) if message.type != "system")
    head = messages[:start]
    state: list[Any] = []
    for end in job["ends"]:
        state += messages[start:end]
        start = end
        update = middleware.before_model({"messages": state}, Runtime())
        if update is not None:
            state = [message for message in update["messages"] if not isinstance(message, RemoveMessage)]
            state[0].id = f"summary {end}"  # an agent's state gives it one
        yield head + state


def _trimming(job: Job, reads: list[int]) -> Iterator[list[BaseMessage]]:
    """As its documentation recommends for chat histories, at the same share of the window."""
    messages = _converted(job)
    for end in job["ends"]:
        yield trim_messages(
            messages[:end],
            max_tokens=int(job["window"] * TRIGGER),
            token_counter=count_tokens_approximately,
            strategy="last",
            start_on="human",
            include_system=True,
        )


@cache
def _size(text: str) -> int:
    return _count(text)


def _exactly(messages: Iterable[Any]) -> int:
    """Tokens as the project counts them, but for what tools' names and frames add."""
    return sum(4 + _size(str(m.content)) + sum(_size(json.dumps(c["args"])) for c in _calls(m)) for m in messages)


def _calls(message: BaseMessage) -> list[Any]:
    return message.tool_calls if isinstance(message, AIMessage) else []


METHODS: dict[str, Callable[[Job, list[int]], Iterator[list[BaseMessage]]]] = {
    "SummarizationMiddleware": _middleware,
    # By default tokens are estimated as a quarter of the characters, and a summary is made of the newest 4,000 tokens
    # of what it replaces, from a message of the user's on: of nothing at all in a long tool loop.
    "SummarizationMiddleware, tuned": partial(_middleware, token_counter=_exactly, trim_tokens_to_summarize=None),
    "trim_messages": _trimming,
}


def _converted(job: Job) -> list[BaseMessage]:
    messages = convert_to_messages(job["messages"])
    for number, message in enumerate(messages):
        message.id = str(number)
    return messages


def outcome(job: Job) -> dict[str, Any]:
    """The prompts of all requests, each message once."""
    reads: list[int] = []
    places: dict[str, int] = {}
    found: list[dict[str, Any]] = []
    prompts = []
    for prompt in METHODS[job["method"]](job, reads):
        for message in prompt:
            if message.id is None:
                raise ValueError("a message without an id")
            if message.id not in places:
                places[message.id] = len(found)
                found.append(convert_to_openai_messages(message))
        prompts.append([places[str(message.id)] for message in prompt])
    return {"messages": found, "prompts": prompts, "reads": reads}


def main() -> None:
    """Answer jobs until the input ends."""
    print(json.dumps({name: version(name) for name in ("langchain", "langchain-core")}), flush=True)
    for line in sys.stdin:
        print(json.dumps(outcome(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
