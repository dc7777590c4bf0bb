"""``python -m bench.quality.constraints``: whether what a user demanded once is still in the prompt, word for word.

The demands are those of COMPINT (https://github.com/ZhiqiEliWang/compaction-integrity, MIT), and those in
``constraints.json``, which were written before the search for rules was tuned. Each is put into recorded sessions at
several depths. It's in a short message, in the middle of a long one, or in a file with instructions. The control has
the newest messages only, with the same number of tokens. No model writes a summary.
"""

from __future__ import annotations

import ast
import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import accumulate, cycle, islice, takewhile
from pathlib import Path

import click

from bench import DATA
from bench.quality.conversations import Conversation, Message
from bench.quality.engine import Engine, running
from bench.quality.langchain import LangChain, langchain
from bench.quality.need.case import tokens
from bench.quality.need.sources import prepared
from bench.quality.text import OURS, last_prompts, size
from bench.table import percent, table
from proxy.dialects.chat.units import text_of

MODULE = "src/compaction_integrity/sssc.py"
OWN = Path(__file__).with_name("constraints.json")
DEPTHS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
WINDOWS = (32_768, 65_536)
READ = "file that the agent read"
FORMS = {"message of up to 500 tokens": (300,), "longer message": (1_000, 3_000, 6_000), READ: (1_500,)}
"""The tokens of other text around a demand, by form."""


def demands(repository: Path) -> list[str]:
    """Return the demands in a clone of COMPINT."""
    (assigned,) = (
        node.value
        for node in ast.parse((repository / MODULE).read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SSSCS"
    )
    return [demand["sssc"] for demand in ast.literal_eval(assigned)]


class Session:
    """A recorded session, with the tokens of each message."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages

    @cached_property
    def sizes(self) -> list[int]:
        """Return the tokens of each message's text."""
        return [tokens([message]) for message in self.messages]

    def place(self, depth: float) -> int:
        """Return the index of the message after a share of the tokens, never that of a result."""
        left = depth * sum(self.sizes)
        place = 0
        while place < len(self.messages) and (left > 0 or self.messages[place]["role"] == "tool"):
            left -= self.sizes[place]
            place += 1
        return place


@cache
def filler(session: Session, role: str, most: int) -> list[str]:
    """Return the first lines of messages with a role, about ``most`` tokens."""
    said = (text_of(message) for message in session.messages if message["role"] == role)
    lines = [line for text in said for line in text.split("\n") if line.strip()]
    return lines[: sum(1 for _ in takewhile(most.__ge__, accumulate(size(line) + 1 for line in lines)))]


def stated(form: str, demand: str, lines: Sequence[str]) -> list[Message]:
    """Return the messages that state a demand in the middle of other text."""
    middle = len(lines) // 2
    if form != READ:
        return [{"role": "user", "content": "\n".join([*lines[:middle], demand, *lines[middle:]])}]
    function = {"name": "Read", "arguments": '{"file_path": "/repo/AGENTS.md"}'}
    text = "\n".join(["# Instructions", *lines[:middle], f"- {demand}", *lines[middle:]])
    calls = [{"id": "demand", "type": "function", "function": function}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    return [called, {"role": "tool", "tool_call_id": "demand", "content": text}]


def cases(texts: Sequence[str], sessions: int, number: int) -> Iterator[tuple[int, float, str]]:
    """Yield the session, the depth, and the demand of each case: ``number`` demands for each depth in each session."""
    wording = cycle(texts)
    for session in range(sessions):
        for depth in DEPTHS:
            for text in islice(wording, number):
                yield session, depth, text


async def measure(
    engine: Engine, other: LangChain | None, sessions: Sequence[Session], texts: Sequence[str], window: int, form: str,
    number: int,
) -> Counter[str]:  # fmt: skip
    """Return the number of cases, the tokens of the proxy's prompts, and the demands in the prompts by method."""
    found: Counter[str] = Counter()
    sizes = cycle(FORMS[form])
    for place_of, depth, text in cases(texts, len(sessions), number):
        session = sessions[place_of]
        around = filler(session, "tool" if form == "longer message" else "assistant", next(sizes))
        place, inserted = session.place(depth), stated(form, text, around)
        messages = [*session.messages[:place], *inserted, *session.messages[place:]]
        conversation = Conversation(f"{place_of} {depth} {text}", messages)
        prompts = await last_prompts(engine, other, conversation, window)
        found.update({"cases": 1, "tokens": size(prompts[OURS])})
        found.update({method: int(text in prompt) for method, prompt in prompts.items()})
    return found


async def compare(sessions: Sequence[Session], sets: dict[str, list[str]], windows: Sequence[int], number: int) -> str:
    """Return the table for some sets of demands."""
    rows = []
    methods: list[str] = []
    with langchain() as other:
        for name, texts in sets.items():
            for window in windows:
                for form in FORMS:
                    async with running() as engine:
                        found = await measure(engine, other, sessions, texts, window, form, number)
                    methods = [method for method in found if method not in ("cases", "tokens")]
                    shares = [percent(found[method] / found["cases"]) for method in methods]
                    mean = f"{found['tokens'] / found['cases']:,.0f}"
                    rows.append([name, form, f"{window:,}", found["cases"], mean, *shares])
    columns = ("demands", "stated in a", "window", "cases", "prompt, mean", *methods)
    return table(columns, rows, left={"stated in a"})


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("repository", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), default=DATA, show_default=False,
              help="The folder with the recorded sessions.")  # fmt: skip
@click.option("--window", "windows", type=int, multiple=True, help="A window in tokens. Default: 32768 and 65536.")
@click.option("--sessions", "most", default=20, show_default=True, help="Sessions to use.")
@click.option("--number", default=1, show_default=True, help="Demands for each depth in each session; 15 are all.")
def main(repository: Path | None, data: Path, windows: Sequence[int], most: int, number: int) -> None:
    """Print the share of demands that are in the prompt word for word. REPOSITORY is a clone of COMPINT."""
    sessions = [Session(case.messages) for case in prepared(data, ())][:most]
    if not sessions:
        click.echo("No recorded sessions, so there is nothing to measure. Fix: --data FOLDER.")
        return
    sets = {} if repository is None else {"COMPINT": demands(repository)}
    sets["own"] = json.loads(OWN.read_text())
    click.echo(asyncio.run(compare(sessions, sets, windows or WINDOWS, number)))


if __name__ == "__main__":
    main()
