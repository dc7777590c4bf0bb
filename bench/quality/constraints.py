"""``python -m bench.quality.constraints``: whether what a user demanded once is still in the prompt, word for word.

The demands are those of COMPINT (https://github.com/ZhiqiEliWang/compaction-integrity, MIT), and those in
``constraints.json``, which were written before the search for rules was tuned. Each is put into recorded sessions at
several depths. It's in a short message, in the middle of a long one, or in a file with instructions. The control has
the newest messages only, with the same number of tokens. No model writes a summary.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click

from bench.quality.__main__ import PYTHON
from bench.quality.conversations import Conversation, Message
from bench.quality.engine import TOKENIZER, Engine
from bench.quality.langchain import MIDDLEWARE, LangChain, langchain
from bench.quality.need.rows import SUMMARIZER
from bench.quality.need.sources import FOLDER, prepared
from bench.quality.need.text import divided, tokens
from bench.quality.need.text import text as text_in
from bench.table import write_json
from proxy.dialects.chat.units import text_of
from proxy.tokens.text import encoding

MODULE = "src/compaction_integrity/sssc.py"
OWN = Path(__file__).with_name("constraints.json")
DEPTHS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
WINDOWS = (32_768, 65_536)
READ = "file that the agent read"
FORMS = {"message of up to 500 tokens": (300,), "longer message": (1_000, 3_000, 6_000), READ: (1_500,)}
"""The tokens of other text around a demand, by form."""


def demands(repository: Path) -> list[str]:
    """Return the demands in a bare git repository of COMPINT."""
    source = subprocess.run(
        ["git", "-C", repository, "show", f"HEAD:{MODULE}"], capture_output=True, text=True, check=True
    ).stdout
    (assigned,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SSSCS"
    )
    return [demand["sssc"] for demand in ast.literal_eval(assigned)]


class Session:
    """A recorded session, with the tokens of each message."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self._fillers: dict[tuple[str, int], list[str]] = {}

    @cached_property
    def sizes(self) -> list[int]:
        """Return the tokens of each message's text."""
        return [tokens([message]) for message in self.messages]

    def filler(self, role: str, most: int) -> list[str]:
        """Return the first lines of messages with a role, about ``most`` tokens."""
        if (role, most) not in self._fillers:
            left, lines = most, []
            for line in (line for one in self.messages if one["role"] == role for line in text_of(one).split("\n")):
                if line.strip():
                    left -= _size(line) + 1
                    if left < 0:
                        break
                    lines.append(line)
            self._fillers[role, most] = lines
        return self._fillers[role, most]

    def place(self, depth: float) -> int:
        """Return the index of the message after a share of the tokens, never that of a result."""
        left = depth * sum(self.sizes)
        place = 0
        while place < len(self.messages) and (left > 0 or self.messages[place]["role"] == "tool"):
            left -= self.sizes[place]
            place += 1
        return place

    def reaches(self, place: int, inserted: str, demand: str, size: int) -> bool:
        """Return whether the instructions and the newest text have ``size`` tokens, up to an inserted demand."""
        after = sum(
            tokens
            for message, tokens in zip(self.messages[place:], self.sizes[place:], strict=True)
            if message["role"] not in ("system", "developer")
        )
        return tokens(divided(self.messages)[0]) + after + _size(inserted[inserted.index(demand) :]) <= size


def _size(text: str) -> int:
    return len(encoding(TOKENIZER).encode_ordinary(text))


def stated(form: str, demand: str, lines: Sequence[str]) -> list[Message]:
    """Return the messages that state a demand in the middle of other text."""
    middle = len(lines) // 2
    if form != READ:
        return [{"role": "user", "content": "\n".join([*lines[:middle], demand, *lines[middle:]])}]
    function = {"name": "Read", "arguments": '{"file_path": "/repo/AGENTS.md"}'}
    text = "\n".join(["# Instructions", *lines[:middle], f"- {demand}", *lines[middle:]])
    return [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "demand", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "demand", "content": text},
    ]


def cases(texts: Sequence[str], sessions: int, number: int) -> Iterator[tuple[int, float, str]]:
    """Yield the session, the depth, and the demand of each case: ``number`` demands for each depth in each session."""
    wording = cycle(texts)
    for session in range(sessions):
        for depth in DEPTHS:
            for text in islice(wording, number):
                yield session, depth, text


async def measure(
    sessions: Sequence[Session], texts: Sequence[str], window: int, form: str, number: int, other: LangChain | None
) -> dict[str, Any]:
    """Return the numbers of cases, of tokens, and of demands in the prompt, in the control, and in LangChain's."""
    found = {"cases": 0, "tokens": 0, "ours": 0, "newest": 0} | ({} if other is None else {"langchain": 0})
    lost: list[str] = []
    sizes = cycle(FORMS[form])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        engine = Engine(Path(folder))
        try:
            for place_of, depth, text in cases(texts, len(sessions), number):
                session = sessions[place_of]
                around = session.filler("tool" if form == "longer message" else "assistant", next(sizes))
                place, inserted = session.place(depth), stated(form, text, around)
                messages = [*session.messages[:place], *inserted, *session.messages[place:]]
                conversation = Conversation(f"{place_of} {depth} {text}", messages)
                prompt = text_in(await engine.last_prompt(conversation, window))
                size = _size(prompt)
                found["cases"] += 1
                found["tokens"] += size
                found["ours"] += text in prompt
                found["newest"] += session.reaches(place, text_of(inserted[-1]), text, size)
                if text not in prompt:
                    lost.append(f"{place_of} {depth} {text}")
                if other is not None:
                    outcome = other.replay(conversation, window, MIDDLEWARE, SUMMARIZER, ends=[len(messages)])
                    found["langchain"] += text in text_in(outcome.messages[one] for one in outcome.prompts[-1])
        finally:
            await engine.aclose()
    return {"window": window, "form": form, **found, "lost": lost}


METHODS = {"ours": "compaction-proxy", "newest": "newest messages only", "langchain": "LangChain"}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as Markdown."""
    titles = ["demands", "stated in a", "window", "cases", "prompt, mean", *METHODS.values()]
    lines = [f"| {' | '.join(titles)} |", "|---|---|" + "---:|" * (len(titles) - 2)]
    for row in rows:
        shares = [f"{row[name] / row['cases']:.1%}".replace("%", " %") if name in row else "–" for name in METHODS]
        figures = [f"{row['window']:,}", str(row["cases"]), f"{row['tokens'] / row['cases']:,.0f}"]
        lines.append(f"| {' | '.join([row['demands'], row['form'], *figures, *shares])} |")
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("repository", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), default=FOLDER, show_default=False,
              help="The folder with the recorded sessions.")  # fmt: skip
@click.option("--window", "windows", type=int, multiple=True, help="A window in tokens. Default: 32768 and 65536.")
@click.option("--form", "forms", type=click.Choice(list(FORMS)), multiple=True, help="Measure one form only.")
@click.option("--sessions", "most", default=20, show_default=True, help="Sessions to use.")
@click.option("--number", default=1, show_default=True, help="Demands for each depth in each session; 15 are all.")
@click.option("--langchain", "python", type=click.Path(path_type=Path), default=PYTHON, show_default=False,
              help="The interpreter of the environment with LangChain. Without it, there's no LangChain.")  # fmt: skip
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every figure to FILE.")
def main(
    repository: Path | None, data: Path, windows: Sequence[int], forms: Sequence[str], most: int, number: int,
    python: Path, file: Path | None,
) -> None:  # fmt: skip
    """Print the share of demands that are in the prompt word for word. REPOSITORY is a bare copy of COMPINT."""
    sessions = [Session(case.messages) for case in prepared(data, ())][:most]
    if not sessions:
        click.echo("No recorded sessions, so there is nothing to measure. Fix: --data FOLDER.")
        return
    sets = {} if repository is None else {"COMPINT": demands(repository)}
    sets["own"] = json.loads(OWN.read_text())
    with langchain(python) if python.exists() else contextlib.nullcontext() as other:
        rows = [
            {"demands": name, **asyncio.run(measure(sessions, texts, window, form, number, other))}
            for name, texts in sets.items()
            for window in windows or WINDOWS
            for form in forms or FORMS
        ]
    click.echo(table(rows))
    write_json(file, rows)


if __name__ == "__main__":
    main()
