"""Conversations by the thousand: small numbers that Hypothesis draws, expanded by a fast generator.

Texts come of a small pool, so that most messages were counted before; ids, order and structure are always new.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import strategies as st

from proxy.config import Policy
from tests.kit.conversations import FLAVOURS, IMAGE, Message, assistant, call, result, system, text_of_size, user

MODEL = "m"

SIZES = (1, 5, 20, 60, 150, 400, 1200, 4000)
"""Tokens of the pool's texts, about."""

PIN = "KEEP-THIS"
"""The pattern of the policy with pinned messages."""

_SHOUTED = f"{PIN}: never deploy on a Friday. "
_RTL = "שלום עולם \u202bمرحبا بالعالم\u202c، "
_SURROGATES = "half of a smile \ud83d and the other \ude00, "
_BASE64 = "data:image/png;base64," + "iVBORw0KGgoAAAANSUhEUg" * 40
_AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRg" * 40, "format": "wav"}}
_FILE = {
    "type": "file",
    "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0x" + "Aa0" * 50},
}
_CACHED = {"type": "ephemeral"}
_TOOLS = ("read_file", "read_file", "run", "write_file", "edit_file", "ls", "grep")

SMALL_STAGES: dict[str, Any] = {
    "duplicates": {"trigger": {"fraction": 0.5}, "keep": {"messages": 2}, "min_length": 50},
    "truncate_args": {"trigger": {"fraction": 0.4}, "keep": {"messages": 2}, "max_length": 200, "tools": ["*"]},
    "evict_results": {"trigger": {"fraction": 0.3}, "keep": {"messages": 4}, "max_tokens": 100, "exclude": ["ls"]},
    "media": {"trigger": {"fraction": 0.45}, "keep": {"messages": 3}},
}


@dataclass(frozen=True)
class Setting:
    """A policy, and whether the upstream wants user and assistant to alternate."""

    name: str
    policy: Policy
    strict: bool = False


def _setting(name: str, *, strict: bool = False, **stated: Any) -> Setting:
    return Setting(name, Policy.build(name, stated), strict)


SETTINGS = (
    _setting("default"),
    _setting("small stages", **SMALL_STAGES),
    _setting("pinned", pinned=[PIN], **SMALL_STAGES),
    _setting("strict", strict=True),
    _setting("no archive", archive=None, evict_results={"max_tokens": 150}),
    _setting("system", summary={"role": "system"}),
    _setting("messages", trigger={"messages": 12}, keep={"messages": 4}),
    _setting("own figures", trigger=[{"messages": 8, "fraction": 0.5}, {"fraction": 0.8}], keep={"tokens": 300}),
    _setting("shorten last", shorten_last_user_message=True, user_messages={"keep_first": False}),
    _setting("bare", duplicates=None, truncate_args=None, evict_results=None, media=None),
    _setting("strict system", strict=True, summary={"role": "system"}, pinned=[PIN]),
)
BUDGETS = (1_500, 1_500, 1_500, 1_500, 3_000)
LARGE_BUDGETS = (8_000, 16_000, 32_000)
ROOMS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.6)
GROWN = (0.6, 0.9, 1.0, 1.3, 2.0)
"""Sizes of conversations, as multiples of the budget."""


@dataclass(frozen=True)
class Batch:
    """An example from Hypothesis: a few conversations under one policy. ``dirt`` is a name in ``DIRT``, or empty."""

    seed: int
    setting: int
    budget: int
    dirt: str

    @property
    def rng(self) -> random.Random:
        return random.Random(f"{self.seed} {self.setting} {self.budget} {self.dirt}")


def batches(budgets: Sequence[int] = BUDGETS, dirt: Sequence[str] = ("",)) -> st.SearchStrategy[Batch]:
    return st.builds(
        Batch,
        seed=st.integers(0, 2**64 - 1),
        setting=st.integers(0, len(SETTINGS) - 1),
        budget=st.sampled_from(budgets),
        dirt=st.sampled_from(dirt),
    )


@cache
def text(size: int, flavour: int, variant: int) -> str:
    """A text of the pool; ``size`` is a place in ``SIZES``."""
    tokens = SIZES[size]
    odd = {FLAVOURS: _RTL, FLAVOURS + 1: _SURROGATES, FLAVOURS + 2: _SHOUTED}.get(flavour)
    if odd is not None:
        return f"{variant} {odd}" + odd * (tokens * 4 // len(odd.encode("utf-8", "surrogatepass")))
    if flavour == FLAVOURS + 3:
        return text_of_size(min(tokens, 60), 0, variant) + _BASE64[: 22 + tokens * 4]
    return text_of_size(tokens, flavour, variant)


class Writer:
    """Writes one conversation of a sound form."""

    def __init__(self, rng: random.Random, budget: int, room: float) -> None:
        """``room`` is the size of the conversation, as a multiple of the budget, about."""
        self.rng = rng
        self.messages: list[Message] = []
        self._budget = budget
        self._left = int(budget * room)
        self._unique = rng.random() < 0.3
        self._last_result: str | None = None
        # Most messages are small, and a few conversations have large ones.
        self._largest = max(
            i for i, size in enumerate(SIZES) if size <= max(150, budget * rng.choice((0.05, 0.1, 0.4, 1.2)))
        )

    def text(self, most: int | None = None) -> str:
        rng = self.rng
        size = min(rng.randrange(self._largest + 1), self._largest if most is None else most)
        # Words and listings are frequent, the odd ones rare.
        flavour = rng.choice((0, 0, 1, 1, 4, rng.randrange(FLAVOURS + 4)))
        self._left -= SIZES[size]
        return text(size, flavour, rng.randrange(4))

    def conversation(self) -> list[Message]:
        rng = self.rng
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            self.add({"role": rng.choice(("system", "system", "developer")), "content": self.text(2)})
        self.ask()
        while self._left > 0 and len(self.messages) < 150:
            rng.choice(_EPISODES)(self)
        if self.messages[-1]["role"] == "assistant":
            self.ask()
        return self.messages

    def add(self, message: Message) -> None:
        self._left -= 6
        self.messages.append(message)

    def ask(self) -> None:
        message = user(self.text())
        self.decorate(message)
        self.add(message)

    def say(self) -> None:
        message = assistant(self.text())
        if self.rng.random() < 0.1:
            message["reasoning_content"] = self.text(3)
        if self.rng.random() < 0.05:
            message = {"role": "assistant", "content": None, "refusal": "I would rather not."}
        self.decorate(message)
        self.add(message)

    def decorate(self, message: Message) -> None:
        """A name, parts in place of a string, marks for the provider's cache, fields that nobody knows."""
        rng = self.rng
        if rng.random() > 0.25:
            return
        if rng.random() < 0.3:
            message["name"] = rng.choice(("ada", "bob"))
        if isinstance(message.get("content"), str) and rng.random() < 0.6:
            part: Message = {"type": "text", "text": message["content"]}
            if rng.random() < 0.4:
                part["cache_control"] = _CACHED
            message["content"] = [part] if rng.random() < 0.7 else [part, {"type": "text", "text": self.text(2)}]
        if rng.random() < 0.1:
            message["x_unknown"] = {"n": [1.5, None]}

    def picture(self) -> None:
        parts: list[Message] = [{"type": "text", "text": self.text(3)}, self.rng.choice((IMAGE, IMAGE, _AUDIO, _FILE))]
        self.rng.shuffle(parts)
        self._left -= 100
        self.add({"role": "user", "content": parts})

    def tools(self) -> None:
        rng = self.rng
        count = rng.choice((1, 1, 1, 2, 3, 5))
        base = len(self.messages)
        ids = [f"call_{base}_{n}" if self._unique else f"call_{n}" for n in range(count)]
        asked = assistant(rng.choice((None, "I look at it.", "")), *(self.call(id_) for id_ in ids))
        if rng.random() < 0.1:
            asked["reasoning_content"] = self.text(2)
        self.add(asked)
        results = [self.result(id_) for id_ in ids]
        if rng.random() < 0.5:
            rng.shuffle(results)
        for message in results:
            self.add(message)

    def call(self, id_: str) -> Message:
        rng = self.rng
        name = rng.choice(_TOOLS)
        arguments: dict[str, Any] = {"path": f"src/f{rng.randrange(9)}.py"}
        if name in ("write_file", "edit_file") or rng.random() < 0.1:
            arguments["content"] = self.text()
            arguments["nested"] = {"list": [self.text(3), 7, None]}
        made = call(id_, name, **arguments)
        if rng.random() < 0.05:
            made["function"]["arguments"] = rng.choice(("", "not JSON", '"text"', "[1,2]"))
        return made

    def result(self, id_: str) -> Message:
        rng = self.rng
        chance = rng.random()
        if chance < 0.1:
            said = ""
        elif chance < 0.3 and self._last_result is not None:
            said = self._last_result
            self._left -= len(said) // 4
        else:
            said = self._last_result = self.text()
        message = result(id_, said)
        if rng.random() < 0.1:
            message["content"] = [{"type": "text", "text": said}]
        if rng.random() < 0.1:
            message["name"] = "read_file"
        return message

    def legacy(self) -> None:
        self.add({"role": "assistant", "content": None, "function_call": {"name": "lookup", "arguments": '{"q": 1}'}})
        self.add({"role": "function", "name": "lookup", "content": self.text()})

    def system(self) -> None:
        if self.rng.random() < 0.2:
            self.add(system(self.text(2)) | {"role": self.rng.choice(("system", "developer"))})


_EPISODES: tuple[Callable[[Writer], None], ...] = (
    *[Writer.tools] * 6,
    *[Writer.ask] * 2,
    *[Writer.say] * 3,
    Writer.picture,
    Writer.legacy,
    Writer.system,
)


def conversation(rng: random.Random, budget: int, dirt: str = "", rooms: Sequence[float] | None = None) -> list[Any]:
    """One conversation, as an application sends it; with faults of a kind at one to four places.

    ``rooms`` are the sizes to choose from, as multiples of the budget.
    """
    room = rng.choice(rooms or (ROOMS if budget < LARGE_BUDGETS[0] else ROOMS[5:]))
    messages: list[Any] = Writer(rng, budget, room).conversation()
    if dirt:
        for _ in range(rng.randint(1, 4)):
            kind = rng.choice([*DIRT]) if dirt == ANY_DIRT else dirt
            DIRT[kind](rng, messages)
    return messages


def encoded(messages: Sequence[Any]) -> list[bytes]:
    """Each message as JSON, half of them in ASCII; lone surrogates can only be escapes."""
    raws = []
    for number, message in enumerate(messages):
        try:
            raws.append(json.dumps(message, ensure_ascii=number % 4 == 3).encode())
        except UnicodeEncodeError:
            raws.append(json.dumps(message).encode())
    return raws


def body_of(raws: Sequence[bytes], model: str = MODEL) -> bytes:
    """A request. The fields around the messages are spelled as no encoder would."""
    return b'{"model": "' + model.encode() + b'",\n "messages": [' + b",\n".join(raws) + b'], "temperature" : 1.0}'


def _place(rng: random.Random, messages: list[Any]) -> int:
    return rng.randint(1, len(messages))


def _some(rng: random.Random, messages: list[Any], wanted: Callable[[Any], bool]) -> int | None:
    found = [i for i, message in enumerate(messages) if isinstance(message, dict) and wanted(message)]
    return rng.choice(found) if found else None


def _is_result(message: Message) -> bool:
    return bool(message.get("role") == "tool")


def _calls(message: Message) -> bool:
    return bool(message.get("tool_calls"))


def _orphan(rng: random.Random, messages: list[Any]) -> None:
    said = text(rng.randrange(5), 0, rng.randrange(4)) if rng.random() < 0.8 else ""
    messages.insert(_place(rng, messages), result(rng.choice(("gone", "call_0", "")), said))


def _dangling(rng: random.Random, messages: list[Any]) -> None:
    if (at := _some(rng, messages, _is_result)) is not None:
        del messages[at]


def _lost_call(rng: random.Random, messages: list[Any]) -> None:
    if (at := _some(rng, messages, _calls)) is not None:
        del messages[at]


def _late(rng: random.Random, messages: list[Any]) -> None:
    if (at := _some(rng, messages, _is_result)) is not None:
        message = messages.pop(at)
        messages.insert(min(len(messages), at + rng.randint(1, 5)), message)


def _same_ids(rng: random.Random, messages: list[Any]) -> None:
    if (at := _some(rng, messages, _calls)) is not None:
        id_ = rng.choice(("", "same", "call_0"))
        for made in messages[at]["tool_calls"]:
            made["id"] = id_
        for message in messages[at + 1 : at + 1 + len(messages[at]["tool_calls"])]:
            if isinstance(message, dict) and message.get("role") == "tool":
                message["tool_call_id"] = id_


def _doubled_result(rng: random.Random, messages: list[Any]) -> None:
    if (at := _some(rng, messages, _is_result)) is not None:
        messages.insert(at + 1, dict(messages[at]))


def _empty(rng: random.Random, messages: list[Any]) -> None:
    messages.insert(_place(rng, messages), {"role": "assistant", "content": rng.choice((None, "", []))})


def _odd_role(rng: random.Random, messages: list[Any]) -> None:
    role = rng.choice(("critic", "", None, 7, "Tool"))
    messages.insert(_place(rng, messages), {"role": role, "content": text(rng.randrange(4), 0, 0)})


def _no_object(rng: random.Random, messages: list[Any]) -> None:
    messages.insert(
        _place(rng, messages), rng.choice((None, 7, "text " * 50, [], {}, {"content": "no role"}, [{"role": "user"}]))
    )


def _cut_off(rng: random.Random, messages: list[Any]) -> None:
    """The client cut its own beginning away, wherever that was."""
    start = next((i for i, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "user"), 0)
    del messages[start : start + rng.randint(1, max(1, len(messages) // 3))]
    if not messages:
        messages.append(user("Go on."))


def _doubled_calls(rng: random.Random, messages: list[Any]) -> None:
    if (at := _some(rng, messages, _calls)) is not None:
        messages.insert(at + 1, dict(messages[at]))


def _user_calls(rng: random.Random, messages: list[Any]) -> None:
    messages.insert(_place(rng, messages), {"role": "user", "content": "I call.", "tool_calls": [call("u")]})


DIRT: dict[str, Callable[[random.Random, list[Any]], None]] = {
    "orphan result": _orphan,
    "dangling call": _dangling,
    "lost call": _lost_call,
    "late result": _late,
    "same ids": _same_ids,
    "doubled result": _doubled_result,
    "empty answer": _empty,
    "odd role": _odd_role,
    "no object": _no_object,
    "cut off": _cut_off,
    "doubled calls": _doubled_calls,
    "user calls": _user_calls,
}
ANY_DIRT = "any"
