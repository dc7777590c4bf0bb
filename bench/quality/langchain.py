"""Starts LangChain's side and asks it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bench.quality.conversations import Conversation
from bench.quality.engine import TOKENIZER, shares
from bench.quality.outcome import Outcome
from proxy.tokens.encodings import check

ROOT = Path(__file__).parents[2]
MIDDLEWARE = "SummarizationMiddleware"
TUNED = "SummarizationMiddleware, tuned"
TRIMMING = "trim_messages"


class LangChain:
    """A running process of ``langchain_side``. ``versions`` says which packages answer."""

    def __init__(self, jobs: IO[str], outcomes: IO[str]) -> None:
        self._jobs = jobs
        self._outcomes = outcomes
        self.versions: dict[str, str] = self._answer()

    def replay(self, conversation: Conversation, window: int, method: str, summariser: str) -> Outcome:
        """What is sent at each of the conversation's requests."""
        job = {
            "method": method,
            "messages": conversation.messages,
            "ends": conversation.requests(),
            "window": window,
            "summariser": summariser,
            "summary_tokens": shares(window).summary,
        }
        self._jobs.write(json.dumps(job) + "\n")
        self._jobs.flush()
        return Outcome(**self._answer())

    def _answer(self) -> Any:
        line = self._outcomes.readline()
        if not line:
            raise RuntimeError("LangChain's side has ended; what it said is above")
        return json.loads(line)


@contextmanager
def langchain(python: Path) -> Iterator[LangChain]:
    """LangChain, by the interpreter of its environment; it ends with the block."""
    # The encoding comes from where the project has it, and nothing is reported to anyone.
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
            raise RuntimeError("a process was started without its pipes")
        yield LangChain(process.stdin, process.stdout)
