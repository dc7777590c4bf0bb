"""A user at work: conversations grow, are rewound, forked and edited; models, tenants and stores change.

The summary model adds up the words that it read, so a summary of anything but this very prefix gives itself away.
"""

import hashlib
import json
import random
import re
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from proxy.pipeline.facts_cache import FactsCache
from proxy.summary.quality import SummaryFailed
from tests.kit.conversations import Message, assistant, call, requests, result, system, user
from tests.kit.engine import Engine, Request, request, runner
from tests.kit.generator import SETTINGS, encoded, text
from tests.kit.judging import in_archive, judge

BUDGET = 1_500
MACHINES, MACHINES_FULL = 8, 60
"""Sessions, without ``--full`` and with it."""
STEPS = 25

REMEMBERED = FactsCache()

_WORD = re.compile(r"\bword\d{6}\b")
_NOTES = re.compile(r"Notes for (\w+) by (\w+) on (\d+) words adding up to ([0-9a-f]{16})\.")
_PREVIOUS = re.compile(r"<previous_summary>\n(.*?)\n</previous_summary>", re.DOTALL)
_TRANSCRIPT = re.compile(r"<transcript>\n(.*)\n</transcript>", re.DOTALL)

seen: Counter[str] = Counter()
"""The totals of the machines."""


def added_up(words: list[str], count: int = 0, total: int = 0) -> tuple[int, int]:
    for word in words:
        count += 1
        total ^= int.from_bytes(hashlib.sha256(word.encode()).digest()[:8])
    return count, total


class Summariser:
    """Write the owner of the notes, and a sum over all the user's words that they replace."""

    def __init__(self) -> None:
        self.broken = False
        self.made = 0

    def ask(self, tenant: str, model: str, material: str) -> str:
        if self.broken:
            raise SummaryFailed("out of order")
        self.made += 1
        count = total = 0
        if previous := _PREVIOUS.search(material):
            notes = _NOTES.fullmatch(previous[1].strip())
            assert notes is not None
            assert notes[1] == tenant
            assert notes[2] == model
            count, total = int(notes[3]), int(notes[4], 16)
        transcript = _TRANSCRIPT.search(material)
        assert transcript is not None
        count, total = added_up(_WORD.findall(transcript[1]), count, total)
        return f"Notes for {tenant} by {model} on {count} words adding up to {total:016x}."


class AtWork(RuleBasedStateMachine):
    """Every step changes something; then the conversation is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = runner()
        self.summariser = Summariser()
        self.branches: list[list[Message]] = []
        self.tenant, self.model = "anna", "small"
        self.words = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        self.engine = Engine(REMEMBERED)
        self.summariser.made = 0
        self.checkpoints: set[object] = set()

    @initialize(setting=st.integers(0, len(SETTINGS) - 1), seed=st.integers(0, 2**32))
    def begin(self, setting: int, seed: int) -> None:
        self.setting = SETTINGS[setting]
        self.rng = random.Random(seed)
        self.messages: list[Message] = [system("Be brief."), user(self.said(1))]
        self.grow(6, 4)

    def said(self, size: int) -> str:
        self.words += 1
        return f"word{self.words:06d} {text(size, self.rng.randrange(7), self.rng.randrange(4))}"

    @rule(exchanges=st.integers(1, 8), size=st.integers(2, 5))
    def grow(self, exchanges: int, size: int) -> None:
        rng = self.rng
        for _ in range(exchanges):
            ids = [f"call_{n}" for n in range(rng.choice((1, 1, 2, 3)))]
            self.messages.append(
                assistant(
                    None,
                    *(call(id_, rng.choice(("run", "write_file")), path="a.py", content=self.texts(3)) for id_ in ids),
                )
            )
            self.messages += [result(id_, self.texts(size)) for id_ in ids]
            if rng.random() < 0.4:
                self.messages += [assistant(self.texts(2)), user(self.said(rng.randrange(4)))]

    def texts(self, most: int) -> str:
        return text(self.rng.randrange(most + 1), self.rng.choice((0, 1, 2, 4)), self.rng.randrange(4))

    @rule(exchanges=st.integers(1, 3))
    def go_on(self, exchanges: int) -> None:
        self.grow(exchanges, 4)

    @rule(back=st.integers(1, 12))
    def rewind(self, back: int) -> None:
        ends = requests(self.messages)
        self.messages = self.messages[: ends[max(0, len(ends) - 1 - back)]]

    @rule()
    def fork(self) -> None:
        self.branches.append([*self.messages])

    @precondition(lambda self: self.branches)
    @rule(which=st.integers(0, 9))
    def go_back_to_a_fork(self, which: int) -> None:
        self.messages = [*self.branches[which % len(self.branches)]]

    @rule(place=st.integers(0, 99))
    def edit_what_the_user_said(self, place: int) -> None:
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        self.messages[users[place % len(users)]] = user(self.said(1))

    @rule(place=st.integers(0, 99))
    def edit_a_result(self, place: int) -> None:
        results = [i for i, message in enumerate(self.messages) if message["role"] == "tool"]
        if results:
            at = results[place % len(results)]
            self.messages[at] = {**self.messages[at], "content": self.texts(4)}

    @rule(model=st.sampled_from(("small", "large")))
    def take_another_model(self, model: str) -> None:
        self.model = model

    @rule(tenant=st.sampled_from(("anna", "bert")))
    def be_another_tenant(self, tenant: str) -> None:
        self.tenant = tenant

    @rule()
    def lose_the_store(self) -> None:
        self.begin_anew()

    @rule(broken=st.sampled_from((True, False, False)))
    def break_or_mend_the_summary_model(self, broken: bool) -> None:
        self.summariser.broken = broken

    @invariant()
    def sent(self) -> None:
        if hasattr(self, "messages"):
            asked = request(encoded(self.messages), self.setting, BUDGET, tenant=self.tenant, model=self.model)
            try:
                self.loop.run(self.judged(asked))
            except AssertionError as error:
                raise AssertionError(f"{error}\n{asked.printed()}") from error

    async def judged(self, asked: Request) -> None:
        def ask(material: str) -> str:
            return self.summariser.ask(self.tenant, self.model, material)

        engine = self.engine
        outcome = await engine.send(asked, ask)
        judged = await judge(asked, outcome, REMEMBERED, clean=True)
        plan = (await engine.compactor.explain(engine.case(asked))).plan
        body = [json.loads(turn.raw) for turn in judged.given[judged.head :]]
        for position in (*plan.checkpoints, *([plan.upcoming] if plan.upcoming else [])):
            before = json.dumps(body[:position])
            self.checkpoints.add((self.tenant, self.model, before, plan.current_user_message.get(position)))
        made = self.summariser.made
        assert made <= len(self.checkpoints), "more summaries were made than there are checkpoints"

        strange = {*_WORD.findall(b"".join(judged.out).decode())} - {*_WORD.findall(asked.body.raw.decode())}
        assert not strange, f"words of another conversation: {strange}"
        if judged.summary is not None:
            self.not_stale(outcome.summary.origin, judged.summary.decode(), body[: plan.cut], plan.pinned)
        await in_archive(engine, asked, judged)

        again = await engine.send(asked, ask)
        assert (again.messages or asked.messages) == (outcome.messages or asked.messages), "sent again it is different"
        assert self.summariser.made == made, "sent again it cost another summary"
        seen["sent"] += 1
        seen[str(outcome.summary.origin)] += 1

    def not_stale(self, origin: str | None, summary: str, dropped: list[Any], pinned: frozenset[int]) -> None:
        notes = _NOTES.search(summary)
        if origin == "digest":
            assert notes is None or (notes[1], notes[2]) == (self.tenant, self.model)
            return
        assert notes is not None, "the summary is not the model's"
        assert notes[1] == self.tenant, "another tenant's summary"
        assert notes[2] == self.model, "a summary for another model"
        users = [m["content"] for i, m in enumerate(dropped) if m["role"] == "user" and i not in pinned]
        words = [word for said in users for word in _WORD.findall(said)]
        assert (int(notes[3]), int(notes[4], 16)) == added_up(words), "a summary of another prefix"

    def teardown(self) -> None:
        self.loop.run(self.engine.aclose())
        self.loop.close()


def test_a_user_at_work(full: bool) -> None:
    seen.clear()
    machines = MACHINES_FULL if full else MACHINES
    run_state_machine_as_test(
        AtWork,
        settings=settings(
            max_examples=machines,
            phases=[Phase.generate],
            stateful_step_count=STEPS,
            database=None,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert seen["sent"] >= machines * 5
    assert seen["made"] >= machines * 1.7
    assert seen["stored"] >= machines * 1.7
    assert seen["digest"] >= machines / 6
