"""``python -m bench.quality.memory``: whether what a question needs is in the prompt, or found by a search.

The cases are those of LongMemEval (https://github.com/xiaowu0162/LongMemEval, MIT): long histories of chats with one
question each. Marks show the sessions and turns with the evidence. The question as it is written is the query. The
prompt has the whole history and the question, and no model writes a summary. Questions without an answer don't count.

``recall_any@k`` is LongMemEval's (``evaluate_retrieval`` in src/retrieval/eval_utils.py): 1 if any marked session is
among the first k different sessions that the search ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import msgspec

from bench.quality.conversations import Conversation, Message
from bench.quality.engine import TOKENIZER, Engine, running
from bench.quality.langchain import LangChain, langchain
from bench.quality.text import last_prompts, size
from bench.table import percent, table
from proxy.config.policy import RecallSettings
from proxy.recall.search import Index, Match, read
from proxy.recall.tool import EXCHANGES, quoted
from proxy.tokens.text import count, encoding

UPDATES = "knowledge-update"
FEW, MANY = 5, EXCHANGES
BY_FEW, BY_MANY = f"search, {FEW}", f"search, {MANY}"
ANY = {f"recall_any@{most}": most for most in (FEW, MANY)}
RANKED = 200
"""Exchanges that the search ranks, several of a session."""
RESULT, NEWEST_FIRST = "result", "newest first"
COUNT = partial(count, encoding(TOKENIZER))

Scores = defaultdict[str, list[float]]
"""Shares of evidence turns by column, one for each question.

``RESULT`` is for a result of the tool. ``NEWEST_FIRST`` has 1 for a question on an updated fact if its newest turn came
before the older ones, else 0.
"""


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
        marked = task["answer_session_ids"]
        question = task["question_id"]
        if evidence and not question.endswith("_abs"):
            yield Case(question, task["question_type"], task["question"], messages, evidence, sessions, marked)


def search(case: Case, scores: Scores) -> None:
    """Add the shares of a search for the question."""
    text = read([msgspec.json.encode(message) for message in case.messages])
    with contextlib.closing(Index([text.passages])) as index:
        found = index.search(case.question, MANY)
        ranked = sorted(index.search(case.question, RANKED), key=lambda match: match.rank)
    order = _turns(found)
    sessions = list(dict.fromkeys(case.sessions[turn] for turn in _turns(ranked)))
    for column, most in ANY.items():
        scores[column].append(float(not set(case.marked).isdisjoint(sessions[:most])))
    scores[BY_MANY].append(_share(case.evidence, order))
    scores[BY_FEW].append(_share(case.evidence, _turns([match for match in found if match.rank < FEW])))
    quotes = quoted([("", match) for match in found], COUNT, RecallSettings().max_tokens)
    shown = {int(start) for start in re.findall(r" offset=(\d+) ", quotes)}
    quoted_turns = {passage.message - 1 for passage in text.passages if passage.start in shown}
    scores[RESULT].append(_share(case.evidence, quoted_turns))
    if case.type == UPDATES and len(case.evidence) > 1:
        ranks = [order.index(turn) if turn in order else len(order) for turn in case.evidence]
        scores[NEWEST_FIRST].append(float(ranks[-1] < min(ranks[:-1])))


def _turns(found: Iterable[Match]) -> list[int]:
    """Return the indexes of the messages of exchanges, in order."""
    passages = [passage for match in found for passage in (*match.passages, match.question) if passage is not None]
    # Passages have the number of their message, from 1.
    return list(dict.fromkeys(passage.message - 1 for passage in passages))


def _share(evidence: Sequence[object], found: Collection[object]) -> float:
    return sum(turn in found for turn in evidence) / len(evidence)


async def ask(case: Case, window: int, engine: Engine, other: LangChain | None, scores: Scores, sizes: Scores) -> None:
    """Add the shares of the evidence turns whose text is in the prompts, and the sizes of the prompts."""
    conversation = Conversation(case.id, [*case.messages, {"role": "user", "content": case.question}])
    for method, prompt in (await last_prompts(engine, other, conversation, window)).items():
        sizes[method].append(size(prompt))
        shown = [turn for turn in case.evidence if str(case.messages[turn]["content"]) in prompt]
        scores[method].append(_share(case.evidence, shown))


async def measure(cases: Sequence[Case], window: int) -> str:
    """Return the table by type of question, and two lines about all questions."""
    scores: dict[str, Scores] = defaultdict(lambda: defaultdict(list))
    sizes: Scores = defaultdict(list)
    with langchain() as other:
        async with running() as engine:
            for case in cases:
                search(case, scores[case.type])
                await ask(case, window, engine, other, scores[case.type], sizes)
    everything: Scores = defaultdict(list)
    for one in scores.values():
        for name, shares in one.items():
            everything[name] += shares
    columns = (BY_FEW, BY_MANY, *ANY, *sizes)
    named = {**dict(sorted(scores.items())), "all": everything}
    rows = [[name, len(one[BY_MANY]), *(_mean(one[column]) for column in columns)] for name, one in named.items()]
    rows.append(["tokens of the prompt, median", *[""] * 5, *(f"{round(median(one)):,}" for one in sizes.values())])
    lines = [table(("questions", "number", *columns), rows), f"\n{len(cases)} of LongMemEval's 500 questions."]
    lines.append(f"\nIn a result of {RecallSettings().max_tokens:,} tokens: {_mean(everything[RESULT])}.")
    if everything[NEWEST_FIRST]:
        lines.append(f"Newest value first: {_mean(everything[NEWEST_FIRST])} of {len(everything[NEWEST_FIRST])}.")
    return "\n".join(lines)


def _mean(shares: Sequence[float]) -> str:
    return percent(fmean(shares) if shares else None)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--window", default=32_768, show_default=True, help="The window of the prompts in tokens.")
def main(folder: Path, window: int) -> None:
    """Print the share of evidence turns that a search finds, and that prompts have, for the histories in FOLDER."""
    cases = list(histories(folder))
    if not cases:
        click.echo(f"There are no histories in {folder}.", err=True)
        return
    click.echo(asyncio.run(measure(cases, window)))


if __name__ == "__main__":
    main()
