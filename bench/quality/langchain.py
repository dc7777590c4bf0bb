"""Start LangChain's process and send it jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench import ROOT
from bench.quality.child import Ask, child
from bench.quality.conversations import Conversation, Message, Outcome
from bench.quality.engine import shares

PYTHON = ROOT / ".venv-bench" / "bin" / "python"
"""The interpreter of the environment with LangChain, which ``scripts/bench`` creates."""

MIDDLEWARE = "SummarizationMiddleware"
TUNED = "SummarizationMiddleware, tuned"


@dataclass(frozen=True)
class LangChain:
    """A running process of ``langchain_side``. ``versions`` has the versions of its packages."""

    versions: dict[str, str]
    ask: Ask

    def cpu(self, messages: Sequence[Any], window: int) -> float:
        """Return the CPU seconds of the first compaction of a conversation, with a model that answers at once."""
        return float(self.ask({"method": "CPU", "messages": messages, "window": window})["cpu"])

    def replay(
        self, conversation: Conversation, window: int, method: str, summarizer: str, ends: Sequence[int] | None = None
    ) -> Outcome:
        """Return the prompts of the conversation's requests. ``ends`` are their numbers of messages."""
        job = {
            "method": method,
            "messages": conversation.messages,
            "ends": conversation.requests() if ends is None else ends,
            "window": window,
            "summarizer": summarizer,
            "summary_tokens": shares(window).summary,
        }
        return Outcome(**self.ask(job))

    def last_prompt(
        self, conversation: Conversation, window: int, method: str, ends: Sequence[int] | None = None
    ) -> list[Message]:
        """Return the prompt of the last request, with a summary model that extracts identifiers."""
        outcome = self.replay(conversation, window, method, "extract", ends)
        return [outcome.messages[place] for place in outcome.prompts[-1]]


@contextmanager
def langchain() -> Iterator[LangChain | None]:
    """Start LangChain with the interpreter of its environment until the block ends. Without it, yield ``None``."""
    if not PYTHON.exists():
        yield None
        return
    environment = {"PYTHONPATH": str(ROOT), "LANGSMITH_TRACING": "false"}
    with child([PYTHON, "-m", "bench.quality.langchain_side"], environment) as (versions, ask):
        yield LangChain(versions, ask)
