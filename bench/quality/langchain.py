"""Start LangChain's process and send it jobs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from bench import ROOT
from bench.quality.conversations import Conversation, Message, Outcome
from bench.quality.engine import TOKENIZER, shares
from proxy.tokens.text import check

PYTHON = ROOT / ".venv-bench" / "bin" / "python"
"""The interpreter of the environment with LangChain, which ``scripts/bench`` creates."""

MIDDLEWARE = "SummarizationMiddleware"
TUNED = "SummarizationMiddleware, tuned"


class LangChain:
    """A running process of ``langchain_side``. ``versions`` has the versions of its packages."""

    def __init__(self, jobs: IO[str], outcomes: IO[str]) -> None:
        self._jobs = jobs
        self._outcomes = outcomes
        self.versions: dict[str, str] = self._answer()

    def cpu(self, messages: Sequence[Any], window: int) -> float:
        """Return the CPU seconds of the first compaction of a conversation, with a model that answers at once."""
        self._jobs.write(json.dumps({"method": "CPU", "messages": messages, "window": window}) + "\n")
        self._jobs.flush()
        return float(self._answer()["cpu"])

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
        self._jobs.write(json.dumps(job) + "\n")
        self._jobs.flush()
        return Outcome(**self._answer())

    def last_prompt(
        self, conversation: Conversation, window: int, method: str, ends: Sequence[int] | None = None
    ) -> list[Message]:
        """Return the prompt of the last request, with a summary model that extracts identifiers."""
        outcome = self.replay(conversation, window, method, "extract", ends)
        return [outcome.messages[place] for place in outcome.prompts[-1]]

    def _answer(self) -> Any:
        line = self._outcomes.readline()
        if not line:
            raise RuntimeError("LangChain's process ended; see its output above")
        return json.loads(line)


@contextmanager
def langchain() -> Iterator[LangChain | None]:
    """Start LangChain with the interpreter of its environment until the block ends. Without it, yield ``None``."""
    if not PYTHON.exists():
        yield None
        return
    # The encoding is the project's copy, and tracing is off.
    environment = {"TIKTOKEN_CACHE_DIR": str(check(TOKENIZER).parent), "LANGSMITH_TRACING": "false"}
    with subprocess.Popen(
        [PYTHON, "-m", "bench.quality.langchain_side"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process has no pipes")
        yield LangChain(process.stdin, process.stdout)
