"""Start LangChain's process and send it jobs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bench.quality.conversations import Conversation
from bench.quality.engine import TOKENIZER, shares
from bench.quality.outcome import Outcome
from proxy.tokens.text import check

ROOT = Path(__file__).parents[2]
MIDDLEWARE = "SummarizationMiddleware"
TUNED = "SummarizationMiddleware, tuned"
TRIMMING = "trim_messages"


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

    def _answer(self) -> Any:
        line = self._outcomes.readline()
        if not line:
            raise RuntimeError("LangChain's process ended; see its output above")
        return json.loads(line)


@contextmanager
def langchain(python: Path) -> Iterator[LangChain]:
    """Start LangChain with the interpreter of its environment. Stop it at the end of the block."""
    # The encoding is the project's copy, and tracing is off.
    environment = {"TIKTOKEN_CACHE_DIR": str(check(TOKENIZER).parent), "LANGSMITH_TRACING": "false"}
    with subprocess.Popen(
        [python, "-m", "bench.quality.langchain_side"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process has no pipes")
        yield LangChain(process.stdin, process.stdout)
