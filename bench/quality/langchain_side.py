"""Run LangChain on the same conversations, in its own environment. Of the project it imports only this folder.

Reads a job per line of standard input and writes an outcome per line of standard output, as JSON. The first line of
output has the versions. Fields of a job: ``method`` (a key of ``METHODS``), ``messages``, ``ends`` (the number of
messages of each request), ``window``, ``summarizer``, ``summary_tokens``. The method ``CPU`` takes only ``messages``
and ``window``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import tiktoken
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    RemoveMessage,
    convert_to_messages,
    convert_to_openai_messages,
)
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.runtime import Runtime

from bench.quality.summarizer import SUMMARIZERS

Job = dict[str, Any]

TRIGGER = 0.85
"""Share of the window. The documentation of LangChain and DeepAgents uses it, and it's the project's default."""

_ENCODING = tiktoken.get_encoding("o200k_base")
# The text of the default prompt before and after the conversation.
_BEFORE, _AFTER = "Messages to summarize:\n", "\n</messages>"


def _count(text: str) -> int:
    return len(_ENCODING.encode(text, disallowed_special=()))


class _Model(BaseChatModel):
    """A chat model that calls a function. Records the tokens that it read."""

    summarizer: str
    summary_tokens: int
    reads: list[int]

    @property
    def _llm_type(self) -> str:
        return "bench"

    def _generate(self, messages: list[BaseMessage], *args: Any, **more: Any) -> ChatResult:
        prompt = "\n".join(message.text for message in messages)
        self.reads.append(_count(prompt))
        material = prompt.split(_BEFORE, 1)[1].rsplit(_AFTER, 1)[0]
        notes = SUMMARIZERS[self.summarizer](material, self.summary_tokens, _count)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(notes))])


def _middleware(job: Job, reads: list[int], **settings: Any) -> Iterator[list[BaseMessage]]:
    """Run the middleware like an agent: before each call of the model, it may replace the state.

    The system prompt isn't part of the state. ``settings`` override the defaults.
    """
    model = _Model(
        summarizer=job["summarizer"],
        summary_tokens=job["summary_tokens"],
        reads=reads,
        profile={"max_input_tokens": job["window"]},
    )
    # Pydantic may have copied the list.
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
            state[0].id = f"summary {end}"  # An agent's state assigns the id.
        yield head + state


@cache
def _size(text: str) -> int:
    return _count(text)


def _exactly(messages: Iterable[Any]) -> int:
    """Count tokens like the project, without tool names and the framing of calls."""
    return sum(
        4 + _size(str(m.content)) + sum(_size(json.dumps(c["args"])) for c in getattr(m, "tool_calls", ()))
        for m in messages
    )


METHODS: dict[str, Callable[[Job, list[int]], Iterator[list[BaseMessage]]]] = {
    "SummarizationMiddleware": _middleware,
    # By default LangChain estimates tokens as a quarter of the characters. It summarizes the newest 4,000 tokens of the
    # replaced messages, starting at a user message. In a long tool loop this leaves nothing to summarize.
    "SummarizationMiddleware, tuned": partial(_middleware, token_counter=_exactly, trim_tokens_to_summarize=None),
}


def _converted(job: Job) -> list[BaseMessage]:
    messages = convert_to_messages(job["messages"])
    for number, message in enumerate(messages):
        message.id = str(number)
    return messages


def outcome(job: Job) -> dict[str, Any]:
    """Return the prompts of all requests, with each message once."""
    reads: list[int] = []
    found: dict[str | None, Any] = {}
    prompts = []
    for prompt in METHODS[job["method"]](job, reads):
        found |= {one.id: convert_to_openai_messages(one) for one in prompt if one.id not in found}
        prompts.append([one.id for one in prompt])
    places = {id_: place for place, id_ in enumerate(found)}
    return {"messages": [*found.values()], "prompts": [[places[id_] for id_ in ids] for ids in prompts], "reads": reads}


def compaction_cpu(job: Job) -> dict[str, Any]:
    """Return the CPU seconds of the tuned middleware for the first compaction of a conversation.

    The messages exist already, and the model answers at once.
    """
    model = FakeListChatModel(responses=["They worked on a code base."], profile={"max_input_tokens": job["window"]})
    middleware = SummarizationMiddleware(
        model, trigger=("fraction", TRIGGER), token_counter=_exactly, trim_tokens_to_summarize=None
    )
    messages = [message for message in _converted(job) if message.type != "system"]
    _size.cache_clear()
    before = time.process_time()
    update = middleware.before_model({"messages": messages}, Runtime())
    cpu = time.process_time() - before
    if update is None:
        raise ValueError("the middleware compacted nothing")
    return {"cpu": cpu}


def main() -> None:
    """Process jobs until the input ends."""
    print(json.dumps({name: version(name) for name in ("langchain", "langchain-core")}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps((compaction_cpu if job["method"] == "CPU" else outcome)(job)), flush=True)


if __name__ == "__main__":
    main()
