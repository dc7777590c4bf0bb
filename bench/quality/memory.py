"""``python -m bench.quality.memory``: whether what a question needs is in the prompt, or found by a search.

The cases are those of LongMemEval (https://github.com/xiaowu0162/LongMemEval, MIT): long histories of chats with one
question each. Marks show the sessions and turns with the evidence. The question as it is written is the query. The
prompt has the whole history and the question, and no model writes a summary. Questions without an answer have marked
sessions only, so they count only there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec

from bench.quality.__main__ import PYTHON
from bench.quality.conversations import Conversation, Message
from bench.quality.engine import TOKENIZER, Engine
from bench.quality.langchain import MIDDLEWARE, LangChain, langchain
from bench.quality.need.score import encoded, newest
from bench.quality.need.text import text as text_in
from bench.quality.need.text import tokens
from bench.table import write_json
from proxy.recall.search import Index, Match, read
from proxy.recall.tool import EXCHANGES, RecallSettings, quoted
from proxy.tokens.text import count, encoding

UPDATES = "knowledge-update"
FEW, MANY = 5, EXCHANGES
COUNT = partial(count, encoding(TOKENIZER))


@dataclass(frozen=True)
class Case:
    """A history, its question, and the indexes of the turns with the evidence, in order of time.

    ``sessions`` has the session of each message, and ``marked`` are the sessions with the evidence.
    """

    id: str
    type: str
    question: str
    messages: Sequence[Message]
    evidence: Sequence[int]
    sessions: Sequence[str]
    marked: Sequence[str]

    @property
    def half(self) -> str:
        """Return ``a`` or ``b``, by the id. Rules are tuned on half ``a`` only."""
        return "ab"[hashlib.sha256(self.id.encode()).digest()[0] % 2]


@dataclass
class Scores:
    """Shares of evidence turns, one for each question: found by the search, and in the prompts by method.

    - ``few`` and ``many`` are for 5 and 10 exchanges.
    - ``result`` is for a result of the tool.
    - ``sessions`` are shares of the sessions for ``many``.
    - ``tokens`` has the sizes of the prompts.
    - ``newest_first`` has 1 for a question on an updated fact if its newest turn came before the older ones, else 0.
    """

    few: list[float] = field(default_factory=list)
    many: list[float] = field(default_factory=list)
    result: list[float] = field(default_factory=list)
    sessions: list[float] = field(default_factory=list)
    prompts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    newest_first: list[float] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


def histories(folder: Path) -> Iterator[Case]:
    """Yield the cases in a folder."""
    for file in sorted(folder.rglob("lme_*.json")):
        task: dict[str, Any] = json.loads(file.read_text())
        messages: list[Message] = []
        evidence = []
        sessions = []
        dated = zip(task["haystack_dates"], task["haystack_session_ids"], task["haystack_sessions"], strict=True)
        for _, id, session in sorted(dated, key=lambda one: one[0]):
            for turn in session:
                if turn.get("has_answer"):
                    evidence.append(len(messages))
                sessions.append(id)
                messages.append({"role": turn["role"], "content": turn["content"]})
        if task["question_id"].endswith("_abs"):
            evidence = []
        marked = task["answer_session_ids"]
        yield Case(task["question_id"], task["question_type"], task["question"], messages, evidence, sessions, marked)


def search(case: Case, scores: Scores) -> None:
    """Add the shares of a search for the question."""
    text = read([msgspec.json.encode(message) for message in case.messages])
    with contextlib.closing(Index([text.passages])) as index:
        found = index.search(case.question, MANY)
    scores.sessions.append(_share(case.marked, {case.sessions[turn] for turn in _turns(found)}))
    if not case.evidence:
        return
    order = _turns(found)
    scores.many.append(_share(case.evidence, order))
    scores.few.append(_share(case.evidence, _turns([match for match in found if match.rank < FEW])))
    quotes = quoted([("", match) for match in found], COUNT, RecallSettings().max_tokens)
    shown = {int(start) for start in re.findall(r" offset=(\d+) ", quotes)}
    quoted_turns = {passage.message - 1 for passage in text.passages if passage.start in shown}
    scores.result.append(_share(case.evidence, quoted_turns))
    if case.type == UPDATES and len(case.evidence) > 1:
        ranks = [order.index(turn) if turn in order else len(order) for turn in case.evidence]
        scores.newest_first.append(float(ranks[-1] < min(ranks[:-1])))


def _turns(found: Iterable[Match]) -> list[int]:
    """Return the indexes of the messages of exchanges, in order."""
    passages = [passage for match in found for passage in (*match.passages, match.question) if passage is not None]
    # Passages have the number of their message, from 1.
    return list(dict.fromkeys(passage.message - 1 for passage in passages))


def _share(evidence: Sequence[object], found: Collection[object]) -> float:
    return sum(turn in found for turn in evidence) / len(evidence)


async def prompts(cases: Sequence[Case], window: int, other: LangChain | None, scores: dict[str, Scores]) -> None:
    """Add the shares of the evidence turns whose text is in the prompts."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        engine = Engine(Path(folder))
        try:
            for case in cases:
                if not case.evidence:
                    continue
                asked = [*case.messages, {"role": "user", "content": case.question}]
                prompt = await engine.last_prompt(Conversation(case.id, asked), window)
                control = newest(encoded(asked), tokens(prompt))
                texts = {"compaction-proxy": text_in(prompt), "newest messages only": control}
                if other is not None:
                    conversation = Conversation(case.id, asked)
                    outcome = other.replay(conversation, window, MIDDLEWARE, "extract", ends=[len(asked)])
                    texts["LangChain"] = text_in(outcome.messages[place] for place in outcome.prompts[-1])
                for method, text in texts.items():
                    scores[case.type].tokens[method].append(COUNT(text))
                    shown = [turn for turn in case.evidence if str(case.messages[turn]["content"]) in text]
                    scores[case.type].prompts[method].append(_share(case.evidence, shown))
        finally:
            await engine.aclose()


def table(scores: dict[str, Scores]) -> str:
    """Return the rows by type of question as Markdown."""
    methods = list(dict.fromkeys(method for one in scores.values() for method in one.prompts))
    titles = (f"search, {FEW}", f"search, {MANY}", f"sessions, {MANY}", *methods)
    lines = [f"| questions | number | {' | '.join(titles)} |", f"| --- |{' ---: |' * (1 + len(titles))}"]
    everything = Scores()
    for kind, one in sorted(scores.items()):
        lines.append(_row(kind, one, methods))
        for name in ("few", "many", "result", "sessions", "newest_first"):
            getattr(everything, name).extend(getattr(one, name))
        for method in methods:
            everything.prompts[method] += one.prompts[method]
            everything.tokens[method] += one.tokens[method]
    lines.append(_row("all", everything, methods))
    if methods:
        sizes = (f"{round(median(everything.tokens[method])):,}" for method in methods)
        lines.append(f"| tokens of the prompt, median | | | | | {' | '.join(sizes)} |")
    lines.append(f"\nIn a result of {RecallSettings().max_tokens:,} tokens: {_mean(everything.result)}.")
    if everything.newest_first:
        lines.append(f"Newest value first: {_mean(everything.newest_first)} of {len(everything.newest_first)}.")
    return "\n".join(lines)


def _row(name: str, one: Scores, methods: Sequence[str]) -> str:
    shares = (one.few, one.many, one.sessions, *(one.prompts[method] for method in methods))
    return f"| {name} | {len(one.many)} | {' | '.join(map(_mean, shares))} |"


def _mean(shares: Sequence[float]) -> str:
    return f"{100 * sum(shares) / len(shares):.1f} %" if shares else "–"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--window", default=32_768, show_default=True, help="The window of the prompts in tokens; 0: no prompts.")
@click.option("--half", type=click.Choice(["a", "b"]), help="Only the cases of one half.")
@click.option("--langchain", "python", type=click.Path(path_type=Path), default=PYTHON, show_default=False,
              help="The interpreter of the environment with LangChain. Without it, there's no LangChain.")  # fmt: skip
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every figure to FILE.")
def main(folder: Path, window: int, half: str | None, python: Path, file: Path | None) -> None:
    """Print the share of evidence turns that a search finds, and that prompts have, for the histories in FOLDER."""
    cases = [case for case in histories(folder) if half in (None, case.half)]
    if not cases:
        click.echo(f"There are no histories in {folder}.", err=True)
        return
    scores: dict[str, Scores] = defaultdict(Scores)
    for case in cases:
        search(case, scores[case.type])
    if window:
        with langchain(python) if python.exists() else contextlib.nullcontext() as other:
            asyncio.run(prompts(cases, window, other, scores))
    click.echo(table(scores))
    write_json(file, msgspec.to_builtins(dict(scores)))


if __name__ == "__main__":
    main()
