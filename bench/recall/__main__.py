"""``python -m bench.recall``: ask for facts that compaction removed, with the recall tool and without it.

Each conversation has facts of the form "the ATTRIBUTE of NAME is VALUE". A scripted model searches for the attribute
and the name, or reads the archive by its id. A fact is found if its value is in what the model gets.
"""

from __future__ import annotations

import json
import logging
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import structlog
import yaml
from rich.console import Console
from rich.table import Table

from bench.quality.conversations import Conversation, multi_turn, tool_loop
from proxy.config import load
from proxy.recall.tool import NAME
from proxy.server.app import create_app
from proxy.server.loopback import serve
from tests.kit.upstream import Reply, StandIn, ToolCall

SHAPES = {"tool loop": tool_loop, "multi-turn": multi_turn}
WINDOWS = (16_000, 64_000)
TARGET = 0.98

TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object", "properties": {}}}}]
_ATTRIBUTES = ("password", "retry limit", "owner", "cutoff date", "license holder", "default branch", "unit price")
_SYLLABLES = ("ba", "dor", "fen", "gil", "kor", "lum", "mer", "nax", "pol", "rus", "sel", "tav", "vor", "wim", "zet")
_ID = re.compile(r"archive as ([0-9a-f]{20})")


@dataclass(frozen=True)
class Fact:
    """A fact in the text of a message."""

    attribute: str
    name: str
    value: str

    @property
    def text(self) -> str:
        return f"the {self.attribute} of {self.name} is {self.value}"


@dataclass
class Found:
    """How many of the facts that aren't in the prompt were found."""

    case: str
    facts: int = 0
    in_prompt: int = 0
    searched: int = 0
    streamed: int = 0
    read: int = 0


def planted(made: Conversation, count: int, seed: str) -> tuple[list[Any], list[Fact]]:
    """Return the messages with ``count`` facts in different messages of their first half, and the facts."""
    randomly = random.Random(seed)
    messages = [dict(message) for message in made.messages]
    old = [
        place
        for place, message in enumerate(messages[: len(messages) // 2])
        if message["role"] in ("assistant", "tool")
    ]
    facts = []
    for place in randomly.sample(old, count):
        name, value = ("".join(randomly.choices(_SYLLABLES, k=4)) for _ in range(2))
        fact = Fact(randomly.choice(_ATTRIBUTES), name, value)
        words = (messages[place]["content"] or "").split(" ")
        words.insert(randomly.randrange(len(words) + 1), fact.text)
        messages[place]["content"] = " ".join(words)
        facts.append(fact)
    return messages, facts


class Model:
    """A scripted model that asks for one fact, then says what it read."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.prompt = ""

    def reply(self, body: dict[str, Any]) -> Reply:
        """Answer a request: with the next call, or the texts of the results."""
        messages = body["messages"]
        if not any(call["function"]["name"] == NAME for call in messages[-2].get("tool_calls") or ()):
            self.prompt = json.dumps(messages)
        if self.calls:
            arguments = {"query": None, "id": None, "offset": None, **self.calls.pop(0)}
            return Reply(tool_calls=(ToolCall(f"r{len(self.calls)}", NAME, json.dumps(arguments)),))
        return Reply(content=json.dumps([message["content"] for message in messages[-8:] if message["role"] == "tool"]))


class Session:
    """One conversation, and the clients that ask about it."""

    def __init__(self, url: str, model: Model, messages: Sequence[Any]) -> None:
        self.url = url
        self.model = model
        self.messages = [*messages, {"role": "user", "content": "What was it?"}]
        self.client = httpx.Client(trust_env=False, timeout=120)

    def ask(self, *calls: dict[str, Any], stream: bool = False) -> str:
        """Return the text of the response to a turn in which the model makes these calls."""
        self.model.calls = list(calls)
        body = {"model": "m", "messages": self.messages, "tools": TOOLS, "stream": stream}
        response = self.client.post(f"{self.url}/v1/chat/completions", json=body, headers={"authorization": "Bearer k"})
        response.raise_for_status()
        if not stream:
            return str(response.json()["choices"][0]["message"]["content"] or "")
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def measured(case: str, session: Session, facts: Sequence[Fact]) -> Found:
    """Ask for each fact that isn't in the prompt."""
    found = Found(case)
    session.ask()
    prompt = session.model.prompt
    (id,) = set(_ID.findall(prompt))
    found.in_prompt = sum(fact.value in prompt for fact in facts)
    missing = [fact for fact in facts if fact.value not in prompt]
    found.facts = len(missing)
    for fact in missing:
        query = {"query": f"{fact.attribute} of {fact.name}"}
        found.searched += fact.value in session.ask(query)
        found.streamed += fact.value in session.ask(query, stream=True)
    found.read = _read(session, id, [fact.value for fact in missing])
    return found


def _read(session: Session, id: str, values: Sequence[str]) -> int:
    """Read the whole entry in pages, and return how many values were in it."""
    text, offset = "", 0
    while True:
        page = session.ask({"id": id, "offset": offset})
        text += page.split("earlier_message", 1)[1]
        following = re.search(r"Continue with offset (\d+)", page)
        if following is None:
            return sum(value in text for value in values)
        # Pages overlap a little here, because a value may be cut by the end of one.
        offset = int(following.group(1)) - 100


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--facts", default=50, show_default=True, help="Facts in each of the four conversations.")
@click.option("--tiny", is_flag=True, help="Only the smaller window.")
def main(facts: int, tiny: bool) -> None:
    """Print how many removed facts a model finds. The exit status is 1 if fewer than 98 %, or by id fewer than all."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows = [measure(shape, window, facts) for shape in SHAPES for window in (WINDOWS[:1] if tiny else WINDOWS)]
    table = Table(title="Facts that compaction removed")
    for title in ("conversation", "planted", "in the prompt", "by search", "by search, streamed", "by id"):
        table.add_column(title)
    for row in rows:
        planted = row.facts + row.in_prompt
        shares = (f"{count / row.facts:.1%} of {row.facts}" for count in (row.searched, row.streamed, row.read))
        table.add_row(row.case, str(planted), f"{row.in_prompt / planted:.0%}", *shares)
    Console(width=120).print(table)
    asked = sum(row.facts for row in rows)
    searched = min(sum(row.searched for row in rows), sum(row.streamed for row in rows))
    sys.exit(int(searched < TARGET * asked or sum(row.read for row in rows) < asked))


def measure(shape: str, window: int, facts: int) -> Found:
    """Measure one conversation of about three windows."""
    conversation = SHAPES[shape](1, 2 * window)
    messages, known = planted(conversation, facts, f"{shape} {window}")
    model = Model()
    upstream = StandIn(window=1_000_000, max_output=50_000, responder=model.reply)
    with tempfile.TemporaryDirectory(prefix="recall-") as folder, serve(upstream.app) as url:
        file = Path(folder, "config.yaml")
        profile = {"context_window": window, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
        settings = {
            "store": {"url": f"sqlite:///{folder}/store.db"},
            "upstreams": {"main": {"base_url": f"{url}/v1"}},
            "models": [{"match": "*", "upstream": "main", "profile": profile}],
            "policies": {"default": {"recall": {"tool": "auto"}}},
        }
        file.write_text(yaml.safe_dump(settings))
        with serve(create_app(load(file, {}))) as entrance:
            return measured(f"{shape}, {window // 1000}K", Session(entrance, model, messages), known)


if __name__ == "__main__":
    main()
