"""Conversations with the newer kinds of items, over HTTP: each compacted prompt is valid, fits, and lacks nothing.

100 compacted prompts by default, and 5,000 of each API with ``--full``.
"""

import contextlib
import itertools
import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.server.loopback import serve
from tests.kit.any_api import Upstream, units
from tests.kit.combinations import combined
from tests.kit.message_checks import Refused as MessageRefused
from tests.kit.message_checks import blocks_of, check_breakpoints, check_results, check_shape
from tests.kit.newer_items import FACT, TALKS, Talk, in_effect, signatures, visible_tokens
from tests.kit.response_items import Refused as ItemRefused
from tests.kit.response_items import check_calls, check_reasoning_ends
from tests.kit.scripted import proxied
from tests.kit.three_apis import APIS, PATHS

WINDOWS = (8_000, 8_000, 12_000, 16_000, 16_000, 32_000)
LARGE = (*WINDOWS, 64_000, 128_000, 200_000)
PROMPTS, PROMPTS_FULL = 25, 5_000
"""Compacted prompts of each API."""
SHARE = 0.3
"""Part of a prompt's room below which everything in effect must be there. The proxy's own limit is a bit higher."""


class Door:
    """A proxy with a model for each window. ``prompts`` are the upstream's requests."""

    def __init__(
        self, running: contextlib.ExitStack, folder: Path, upstream: Upstream, address: str, **policy: Any
    ) -> None:
        self._upstream = upstream
        models = [
            {"match": f"claude-sonnet-5.5-{window}", "upstream": "main", "profile": _profile(window)}
            for window in sorted({*LARGE})
        ]
        settings = {
            "store": {"url": f"sqlite:///{folder}/store.db"},
            "upstreams": {"main": {"base_url": f"{address}/v1", "api_key": "k", "speaks": [*APIS]}},
            "models": models,
            "policies": {"default": {"prepare": [], **policy}},
        }
        self._url = running.enter_context(proxied(settings, folder))
        self._http = running.enter_context(httpx.Client(trust_env=False, timeout=60))

    def send(self, talk: Talk, end: int, key: str) -> tuple[httpx.Response, dict[str, Any], list[str]]:
        """Send the first units of a conversation. Return the response, the prompt, and the requests for summaries."""
        name = "input" if talk.api == "responses" else "messages"
        body = {"model": f"claude-sonnet-5.5-{talk.window}", **talk.fields(), name: talk.units[:end]}
        headers = {"authorization": f"Bearer {key}"}
        response = self._http.post(self._url + PATHS[talk.api], json=body, headers=headers)
        assert response.status_code == 200, response.text[:300]
        prompt = self._upstream.bodies.pop()
        return response, prompt, [self._upstream.summaries.pop() for _ in list(self._upstream.summaries)]


def _profile(window: int) -> dict[str, Any]:
    return {"context_window": window, "max_output_tokens": window // 16, "tokenizer": "o200k_base"}


def fault(talk: Talk, body: dict[str, Any]) -> str | None:
    """Return the error with which a strict server would reject a prompt."""
    api = talk.api
    try:
        if api == "messages":
            check_shape(body, alternate=False)
            check_results(body["messages"])
            check_breakpoints(body)
            return unbound(talk, body)
        items = [talk.resolved(item) for item in body["input"]]
        check_calls(items)
        check_reasoning_ends(items)
    except (MessageRefused, ItemRefused) as refused:
        return str(refused)
    return None


def unbound(talk: Talk, body: dict[str, Any]) -> str | None:
    """Return the error for thinking behind another prompt than the one that it answered, or with gaps."""
    found = signatures(body)[0]
    if any(signature.split()[0] != before for signature, before in found):
        return "the thinking is bound to a different conversation"
    kept = [talk.signed.index(signature) for signature, _ in found]
    gaps = any(later != one + 1 for one, later in itertools.pairwise(kept))
    return "thinking is missing in the middle" if gaps else None


class Judge:
    """Checks the prompts of one conversation. ``found`` counts their faults by kind."""

    def __init__(self, talk: Talk, found: Counter[str], examples: dict[str, str], name: str) -> None:
        self._talk, self._found, self._examples, self._name = talk, found, examples, name
        self._read: set[str] = set()
        self._summaries: set[str] = set()

    def see(self, response: httpx.Response, prompt: dict[str, Any], summaries: list[str], end: int, task: str) -> bool:
        """Check a prompt. Return whether it was compacted."""
        talk = self._talk
        compacted = response.headers["x-compaction"] == "compacted"
        text = json.dumps(prompt)
        for seen in (text, *summaries):
            self._read.update(FACT.findall(seen))
        size = visible_tokens([talk.resolved(unit) for unit in units(prompt)])
        if size > talk.window - talk.window // 16:
            self.fail("too large", end, f"{size} tokens")
        if not compacted:
            return False
        self._found["compacted"] += 1
        summary = [one for one in map(json.dumps, units(prompt)) if "<conversation_summary>" in one]
        self._found["checkpoints"] += bool(summary) and summary[0] not in self._summaries
        self._summaries.update(summary[:1])
        if (refused := fault(talk, prompt)) is not None:
            self.fail("invalid", end, refused)
        fitted = "fit" in response.headers.get("x-compaction-steps", "")
        if not fitted and (lost := {*FACT.findall(json.dumps(talk.units[:end]))} - self._read):
            self.fail("facts that nobody read", end, str(sorted(lost)[:5]))
        if json.dumps(task)[1:-1] not in text:
            self.fail("the task isn't there", end, task[:40])
        self._state(prompt, text, end)
        return True

    def _state(self, prompt: dict[str, Any], text: str, end: int) -> None:
        wanted, there = in_effect(self._talk.units[:end]), in_effect(units(prompt))
        shown = {name for name, value in wanted.items() if name.startswith("note") and json.dumps(value)[1:-1] in text}
        missing = {name for name, value in wanted.items() if there.get(name) != value} - shown
        extra = {name for name in there if name not in wanted and name.startswith("tool")}
        if extra:
            self.fail("in effect but not asked for", end, str(extra))
        room = self._talk.window - self._talk.window // 16
        size = sum(60 + visible_tokens(value) for value in wanted.values())
        self._found["with state"] += bool(wanted)
        if missing and size <= SHARE * room:
            self.fail("not in effect anymore", end, f"{sorted(missing)[:4]} of {len(wanted)}, {size} of {room} tokens")
        said = {*re.findall(r"\w+", json.dumps(units(prompt)))}
        untold = [name for name in missing if name.startswith("tool") and name.split()[1] not in said]
        if untold and size > SHARE * room:
            self.fail("missing tools that the prompt doesn't name", end, str(untold))

    def fail(self, kind: str, end: int, words: str) -> None:
        self._found[kind] += 1
        self._examples.setdefault(kind, f"{kind}: {self._name}, first {end} units: {words}")


def run(
    api: str, wanted: int, windows: tuple[int, ...], folder: Path, turns: int = 0
) -> tuple[Counter[str], dict[str, str]]:
    """Send conversations until this many prompts were compacted. Return the counts, and an example of each fault."""
    found: Counter[str] = Counter()
    examples: dict[str, str] = {}
    upstream = Upstream()
    again: list[tuple[Talk, str, dict[int, bytes], Judge]] = []
    with contextlib.ExitStack() as running:
        address = running.enter_context(serve(upstream.app))
        doors = [Door(running, _made(folder / name), upstream, address) for name in ("first", "fresh")]
        bare = Door(running, _made(folder / "bare"), upstream, address, archive=None)
        seed = int(os.environ.get("NEWER_ITEMS_SEED", "0"))
        while found["compacted"] < wanted:
            rng = random.Random(seed)
            window = windows[seed % len(windows)]
            talk = TALKS[api](seed, window, 0 if turns else rng.choice((1.2, 2, 3)), turns)
            judge = Judge(talk, found, examples, f"seed {seed}, window {window}")
            seen: dict[int, bytes] = {}
            door = bare if talk.refers and seed % 2 else doors[0]
            for end, task, answer in talk.exchanges():
                prompt: Any = {**talk.fields(), "messages": talk.units[:end]}
                if talk.refers or visible_tokens(talk.units[:end]) > 0.2 * window or rng.random() < 0.1:
                    upstream.output = answer
                    response, prompt, summaries = door.send(talk, end, f"key-{seed}")
                    if judge.see(response, prompt, summaries, end, task) and _lasts(response):
                        seen[end] = _bytes(prompt)
                talk.answered(end, prompt)
            upstream.output = []
            sample = rng.sample(sorted(seen), min(4, len(seen)))
            others = {"rewound": door} if talk.refers else {"rewound": door, "in another order": doors[1]}
            for name, other in others.items():
                _compare(name, other, talk, f"key-{seed}", {end: seen[end] for end in sample}, judge)
            again.append(
                (talk, f"key-{seed}", {end: seen[end] for end in sample[:1]} if door is doors[0] else {}, judge)
            )
            seed += 1
        restarted = Door(running, folder / "first", upstream, address)
        for talk, key, seen, judge in again[-20:]:
            _compare("after a restart", restarted, talk, key, seen, judge)
    return found, examples


def _compare(name: str, door: Door, talk: Talk, key: str, prompts: dict[int, bytes], judge: Judge) -> None:
    for end, before in prompts.items():
        response, prompt, _ = door.send(talk, end, key)
        if _bytes(prompt) != before and _lasts(response):
            judge.fail(f"other bytes {name}", end, "")


def _lasts(response: httpx.Response) -> bool:
    """Return whether the next request gets the same summary. Extracts may be replaced by one from a model."""
    return response.headers.get("x-compaction-summary") != "digest"


def _bytes(prompt: dict[str, Any]) -> bytes:
    """Return a prompt without thinking. Whether that goes may depend on the prompts that were sent before."""
    messages = [{**one, "content": [b for b in blocks_of(one) if b["type"] != "thinking"]} for one in _turns(prompt)]
    return json.dumps({**prompt, "messages": messages}).encode()


def _turns(prompt: dict[str, Any]) -> list[Any]:
    return [one for one in prompt.get("messages", []) if one.get("content")]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.long
@pytest.mark.parametrize("api", TALKS)
def test_compacted_prompts_are_valid_and_lack_nothing(api: str, full: bool, tmp_path: Path) -> None:
    found, examples = run(api, PROMPTS_FULL if full else PROMPTS, LARGE if full else WINDOWS, tmp_path)
    print(dict(found))
    assert not examples, "\n".join(["", *examples.values(), str(dict(found))])


@pytest.mark.parametrize("api", combined(2, TALKS))
def test_sessions_of_100_turns_keep_what_is_in_effect(api: str, tmp_path: Path) -> None:
    """The user asks three times, and tools are loaded five times, with at least three checkpoints after each other."""
    found, examples = run(api, 30, (16_000,), tmp_path, turns=100)
    assert found["checkpoints"] >= 3
    assert not examples, "\n".join(["", *examples.values(), str(dict(found))])
