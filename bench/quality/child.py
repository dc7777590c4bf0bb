"""Run a program of another environment, which takes jobs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.quality.engine import TOKENIZER
from proxy.tokens.text import check

Ask = Callable[[Mapping[str, Any]], Any]
"""Sends a job, and returns its result."""


@contextmanager
def child(command: Sequence[str | Path], environment: Mapping[str, str]) -> Iterator[tuple[Any, Ask]]:
    """Run a program until the block ends. Yield the first line that it writes, and a function that sends it jobs.

    The program reads a job per line, and writes a result per line, as JSON. It has the project's copy of the encoding.
    """
    variables = {**os.environ, "TIKTOKEN_CACHE_DIR": str(check(TOKENIZER).parent), **environment}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=variables) as process:
        jobs, results = process.stdin, process.stdout
        assert jobs is not None
        assert results is not None

        def result() -> Any:
            line = results.readline()
            if not line:
                raise RuntimeError(f"{command[0]} ended; see its output above")
            return json.loads(line)

        def ask(job: Mapping[str, Any]) -> Any:
            jobs.write(json.dumps(job) + "\n")
            jobs.flush()
            return result()

        yield result(), ask
