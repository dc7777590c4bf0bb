"""What clients say is in effect, in any place and on any API: it stays until it ends, and its end stays as long."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from proxy.compaction.rules import Rules
from proxy.compaction.turn import Turn, attributed
from proxy.dialects.apis import DIALECTS
from proxy.limits.profiles import Profile
from tests.kit.agent_client import REQUIREMENTS, TASK, Client, reminder
from tests.kit.any_api import strings
from tests.kit.combinations import combined
from tests.kit.compacting import rules, send
from tests.kit.messages import words
from tests.kit.three_apis import APIS

BUDGET = 14_000
NOTES = "Goal: see the messages. Next step: go on."
RESUMED = (
    "This session is being continued from a previous conversation that ran out of context. The summary below covers "
    f"the earlier portion of the conversation.\n\n{NOTES}\n\nContinue the conversation from where it left off without "
    "asking the user any further questions. Resume directly. Begin with the next open step."
)


@dataclass(frozen=True)
class Said:
    """Something in effect, and what ends or replaces it. Of each, this mark shows whether it's in a prompt."""

    begins: str
    mark: str
    ends: str = ""
    end: str = ""
    replaced: bool = False
    """Whether the end has the same name, so that the beginning need not stay."""


def kinds(n: int) -> dict[str, Said]:
    """Return what agents say, with marks of their own for number ``n``."""
    rules = f"MARK-RULE-{n} {words(60, f'rule{n}')}"
    claude = f"# claudeMd\nContents of /w/{n}/CLAUDE.md (project instructions):\n\n{rules}"
    skills = f"The following skills are available for use:\n\n- MARK-SKILL-{n}: deploys"
    build = f"Your operational mode has changed from plan to build {n}-X.\nYou are permitted to make changes."
    return {
        "project": Said(reminder(claude), rules),
        "path": Said(reminder(f"Contents of /w/.claude/rules/r{n}.md (rule for src/**):\n\n{rules}"), rules),
        "skills": Said(reminder(skills), f"MARK-SKILL-{n}"),
        "opencode": Said(reminder(f"Instructions from: /w/{n}/AGENTS.md\n{rules}"), rules),
        "plan": Said(
            reminder(f"Plan mode {n} is active. You MUST NOT-{n} make any edits."),
            f"MUST NOT-{n} make",
            reminder(f"## Exited Plan Mode\n\nYou have exited plan mode {n}-X. You can now make edits."),
            f"plan mode {n}-X",
        ),
        "cursor": Said(
            reminder(f"Plan mode {n} is on. MUST NOT-{n} write.", "system_reminder"),
            f"MUST NOT-{n} write",
            reminder(f"Plan mode {n}-X is off. You may write.", "system_reminder"),
            f"mode {n}-X is",
        ),
        "switch": Said(
            reminder(f"# Plan Mode - System Reminder {n}\n\nSTRICTLY FORBIDDEN-{n}: any file edits."),
            f"FORBIDDEN-{n}:",
            reminder(build),
            f"build {n}-X",
        ),
        "tools": Said(
            reminder(f"The following deferred tools are now available via ToolSearch:\nTOOL-{n}-A\nTOOL-{n}-B"),
            f"TOOL-{n}-A",
            reminder(f"The following deferred tools are no longer available (server {n}-X disconnected):\nTOOL-{n}-B"),
            f"server {n}-X",
        ),
        "server": Said(
            reminder(f"# MCP Server Instructions\n\n## srv{n}\nALWAYS-{n} pass the token."),
            f"ALWAYS-{n} pass",
            reminder(f"The following MCP servers have disconnected; their instructions no longer apply: srv{n}-X"),
            f"srv{n}-X",
        ),
        "environment": Said(
            f"<environment_context>\n  <cwd>/w/{n}/a</cwd>\n</environment_context>",
            f"/w/{n}/a",
            f"<environment_context>\n  <cwd>/w/{n}/b-X</cwd>\n</environment_context>",
            f"/w/{n}/b-X",
            replaced=True,
        ),
        "agents": Said(f"# AGENTS.md instructions for /w/{n}\n\n<INSTRUCTIONS>\n{rules}\n</INSTRUCTIONS>", rules),
        "goal": Said(
            f'<codex_internal_context source="goal">\nObjective: ship {n}-A\n</codex_internal_context>',
            f"ship {n}-A",
            f'<codex_internal_context source="goal">\nObjective: ship {n}-B-X\n</codex_internal_context>',
            f"ship {n}-B-X",
            replaced=True,
        ),
    }


Place = Callable[[Client, str], None]
PLACES: dict[str, Place] = {
    "a later message": lambda client, text: client.user(text, "Go on with the next part."),
    "before a text": lambda client, text: client.user(text, "Go on.", joined=True),
    "after a text": lambda client, text: client.user("Go on.", text, joined=True),
    "beside a result": lambda client, text: client.step(beside=(text,)),
    "beside a result with a text": lambda client, text: client.step(beside=("Tool loaded.", text)),
    "the end of a result": lambda client, text: client.step(end=text),
    "the end of a listed result": lambda client, text: client.step(end=text, listed=True),
    "a message of its own": lambda client, text: client.user(text),
}
OF_REMINDERS = ("the end of a result", "the end of a listed result")


class Prompts:
    """The prompts of a conversation that was compacted, as text."""

    def __init__(self, api: str, policy: Rules) -> None:
        self._policy = policy
        self._dialect = DIALECTS[api]
        self._format = self._dialect.counters(Profile("m", tokenizer="o200k_base")).format
        self._turns: dict[bytes, Turn] = {}
        self.compacted = 0

    def of(self, client: Client) -> str:
        """Return the texts of the prompt for the client's next request; empty unless it's compacted."""
        return "\n".join(self.messages(client))

    def messages(self, client: Client) -> list[str]:
        """Return the texts of each message of that prompt; none unless it's compacted."""
        raws = [bytes(raw) for raw in self._dialect.request.parse(client.body()).units]
        for raw in raws:
            if raw not in self._turns:
                self._turns[raw] = Turn(raw, self._format.read(raw))
        turns = attributed([self._turns[raw] for raw in raws])
        assert not self._format.needs_repair([turn.facts for turn in turns])
        sent = send(turns, self._policy, BUDGET, lambda dropped: NOTES, self._format)
        if sent.plan is None:
            return []
        self.compacted += bool(sent.plan.cut)
        return ["\n".join(strings(json.loads(raw))) for raw in sent.raws]


def session(client: Client, prompts: Prompts, rng: random.Random, *, resumed: bool) -> Iterator[str]:
    """Run a session, and yield what is wrong with a prompt."""
    waiting: list[tuple[int, Said, str]] = []
    said: list[tuple[Said, bool, str]] = []
    names = rng.sample(sorted(kinds(0)), 5)
    first = [kinds(n)[name] for n, name in enumerate(names[:2])]
    if resumed:
        client.user(RESUMED)
        client.user(*(one.begins for one in first), TASK)
    else:
        client.user(*(one.begins for one in first), TASK)
    said += [(one, False, "the first message") for one in first]
    waiting += [(rng.randrange(4, 45), one, "the first message") for one in first if one.ends]
    starts = {rng.randrange(1, 30): kinds(n + 2)[name] for n, name in enumerate(names[2:])}
    task = True
    for step in range(75):
        if (one := starts.get(step)) is not None:
            task &= say(client, rng, one.begins, place := chosen(rng, one.begins))
            said.append((one, False, place))
            waiting += [(step + rng.randrange(3, 30), one, place)] if one.ends else []
        for when, one, began in waiting:
            if when == step:
                task &= say(client, rng, one.ends, place := chosen(rng, one.ends))
                said = [(other, other is one or ended, at) for other, ended, at in said if other is not one]
                said.append((one, True, f"{began}, ended in {place}"))
        client.step()
        if text := prompts.of(client):
            yield from faults(text, said)
            if task and (lost := [one for one in REQUIREMENTS if one not in text]):
                yield f"{len(lost)} requirements lost"


def chosen(rng: random.Random, text: str) -> str:
    places = [place for place in PLACES if text.startswith("<system") or place not in OF_REMINDERS]
    return rng.choice(places)


def say(client: Client, rng: random.Random, text: str, place: str) -> bool:
    """Say something in a place. Return whether the agent still works on the same task."""
    new = "message" in place or (place.endswith("a text") and not place.startswith("beside"))
    if new:
        client.say()
    PLACES[place](client, text)
    return not new


def faults(text: str, said: list[tuple[Said, bool, str]]) -> Iterator[str]:
    for one, ended, place in said:
        if not ended and one.mark not in text:
            yield f"{one.mark[:24]!r} lost, said in {place}"
        if ended and one.end not in text:
            yield f"the end {one.end!r} lost, {place}"
        if ended and one.mark in text and text.rfind(one.mark) > text.rfind(one.end):
            yield f"{one.mark[:24]!r} after its end, {place}"


@pytest.mark.long
@pytest.mark.parametrize(("seed", "api"), combined(8, range(8), APIS))
def test_what_is_in_effect_stays_until_it_ends(api: str, seed: int) -> None:
    resumed = seed % 4 < 2
    client, prompts = Client(api), Prompts(api, rules(results=seed % 2 == 0, duplicates=False))
    wrong = sorted(set(session(client, prompts, random.Random(f"{api} {seed} {resumed}"), resumed=resumed)))
    assert seed % 2 == 0 or prompts.compacted > 20
    assert wrong == []


@pytest.mark.parametrize(("api", "ends", "listed"), combined(2, APIS, [1, 2], [False, True]))
def test_shortened_results_keep_only_reminders_that_are_new(api: str, ends: int, *, listed: bool) -> None:
    client, prompts = Client(api), Prompts(api, rules())
    reminders = [reminder(f"Plan mode {n} is on.\nMARK-{n} {words(40, f'mode {n}')}") for n in range(ends)]
    client.user(TASK)
    shortened = []
    for step in range(60):
        client.step(end=reminders[step % ends], listed=listed)
        if prompt := prompts.messages(client):
            assert all(any(one in text for text in prompt) for one in reminders)
            shortened.append([text for text in prompt if "left out" in text and "old tool result" in text])
    assert max(map(len, shortened)) > 3
    kept = [sum("MARK-" in text for text in texts) for texts in shortened]
    assert max(kept) <= 1 if ends == 1 else kept == [len(texts) for texts in shortened]


@pytest.mark.parametrize(("seed", "api"), combined(2, range(6), APIS))
def test_a_repeated_reminder_never_leaves_the_prompt(api: str, seed: int) -> None:
    """Results repeat it in runs, or twice in copies only. They are shortened, or replaced as copies or old reads."""
    rng, client, prompts = random.Random(f"{api} {seed}"), Client(api), Prompts(api, rules())
    texts = [reminder(f"Plan mode {n} is on.\nMARK-{n} {words(rng.choice((9, 60)), f'mode {n}')}") for n in range(2)]
    client.user(TASK)
    newest = said = changed = 0
    for step in range(60):
        newest = newest if step < 2 or rng.random() < 0.9 else 1 - newest
        begins = step < 2
        old = 4 if begins else rng.randrange(4)
        says = begins or (seed > 2 and step < 45 and rng.random() < 0.7)
        copy = begins or rng.random() < 0.4
        out, path = (f"copy {old}: {words(300, f'copy {old}')}", "") if copy else ("", f"src/{old}.py")
        client.step(end=texts[newest] if says else "", listed=seed % 2 > 0, path=path, out=out)
        said = newest if says else said
        if prompt := prompts.of(client):
            assert texts[said] in prompt
            assert prompt.rfind(texts[said]) > prompt.rfind(texts[1 - said])
            changed += 1
    assert changed > 10
