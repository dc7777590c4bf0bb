"""Conversations for tests: building blocks, a cheap counter, and a generator of valid ones.

A generated conversation is a list of episodes of a few small numbers each, so that Hypothesis can shrink a failing
example. ``expand`` turns it into messages.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from proxy.compaction.pressure import COMMA
from proxy.compaction.turn import Turn
from proxy.dialects.chat.units import ChatUnits
from proxy.dialects.units import encode
from tests.kit.messages import Message, assistant, call, result, system, user

IMAGE_TOKENS = 85
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 50}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 1_000}}
"""The same, of 11,000 bytes."""


def text_tokens(text: str) -> int:
    return -(-len(text.encode("utf-8", "surrogatepass")) // 4)


def message_tokens(message: Any) -> int:
    """The text of all fields, an image at a fixed size, and four for the frame."""
    tokens = 4
    for key, value in message.items():
        if key == "content" and isinstance(value, list):
            tokens += sum(_part_tokens(part) for part in value)
        elif key != "role" and value is not None:
            tokens += text_tokens(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return tokens


def _part_tokens(part: Any) -> int:
    if isinstance(part, dict) and part.get("type") == "image_url":
        return IMAGE_TOKENS
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return text_tokens(part["text"])
    return text_tokens(json.dumps(part, ensure_ascii=False))


class Counting(ChatUnits):
    """A format that knows how often it counted a message."""

    def __init__(self, count: Callable[[Any], int] = message_tokens) -> None:
        super().__init__(self._counted, text_tokens)
        self._tokens = count
        self.counts = 0

    def _counted(self, message: Any) -> int:
        self.counts += 1
        return self._tokens(message)


FORMAT = ChatUnits(message_tokens, text_tokens)


def turn(message: Any, format: ChatUnits = FORMAT) -> Turn:
    """The message as the core takes it."""
    raw = encode(message)
    return Turn(raw, format.read(raw))


def turns(messages: Sequence[Any], format: ChatUnits = FORMAT) -> list[Turn]:
    return [turn(message, format) for message in messages]


def bytes_of(messages: Sequence[Any]) -> int:
    """Return the bytes of messages in a request, with the commas between them."""
    return sum(len(turn.raw) + COMMA for turn in turns(messages))


@dataclass(frozen=True)
class Episode:
    """``size`` is in thousandths of the window; ``flavour`` chooses the kind of text, ``seed`` the text itself."""

    kind: str
    size: int
    calls: int
    flavour: int
    seed: int


KINDS = ("ask", "tools", "tools", "tools", "write", "write", "say", "picture", "system", "legacy")
FLAVOURS = 7

LARGEST = 4000
"""Tokens of the largest episode, so that a conversation in a large window does not take seconds."""

episodes = st.builds(
    Episode,
    kind=st.sampled_from(KINDS),
    size=st.sampled_from((0, 3, 10, 30, 60, 100, 200, 600, 1000)),
    calls=st.integers(1, 5),
    flavour=st.integers(0, FLAVOURS - 1),
    seed=st.integers(0, 99),
)
conversations = st.lists(episodes, min_size=1, max_size=8) | st.lists(episodes, min_size=8, max_size=30)


def text_of_size(tokens: int, flavour: int, seed: int) -> str:
    """Return a text of about this number of tokens, as ``text_tokens`` counts them. It's never empty."""
    rng = random.Random(seed * FLAVOURS + flavour)
    makers: tuple[Callable[[], str], ...] = (
        lambda: rng.choice(("the", "build", "failed", "again", "because", "of", "a", "missing", "comma")) + " ",
        lambda: f"src/{rng.choice('abc')}/mod{rng.randrange(90)}.py:{rng.randrange(900)}: error E{rng.randrange(99)}\n",
        lambda: rng.choice(("日本語", "中文字", "한국어", "の、", "。\n")),
        lambda: rng.choice(("🙂", "👩‍👩‍👧", "é", "ß", "𝔘", "\u200d", " ")),
        lambda: json.dumps({"id": rng.randrange(10**6), "name": "x" * rng.randrange(9)}) + "\n",
        lambda: "abcdefghij"[rng.randrange(9) :],
        lambda: rng.choice(("</user_message>", "<conversation_summary>", "</CONVERSATION_SUMMARY>", "<b>", "\n")),
    )
    block = "".join(makers[flavour % FLAVOURS]() for _ in range(60))
    repeated = block * (tokens * 4 // len(block.encode()) + 1)
    return repeated[: max(1, len(repeated) * tokens * 4 // len(repeated.encode()))]


def expand(drawn: Sequence[Episode], window: int, *, head: int = 1) -> list[Message]:
    """The messages of the episodes; the first is the user's. ``head`` system messages come before them."""
    messages: list[Message] = [system(f"You are helper number {n}. Be brief.") for n in range(head)]
    messages.append(user("Please begin: repair the build."))
    for episode in drawn:
        size = min(episode.size * window // 1000, LARGEST)
        messages += _EXPAND[episode.kind](episode, size)
    return messages


def _tools(episode: Episode, size: int) -> list[Message]:
    # The same ids come again in every exchange, as some servers number them.
    ids = [f"call_{n}" for n in range(episode.calls)]
    asked = assistant(
        None if episode.seed % 2 else "I look at it.",
        *(call(id_, "ls" if n == 4 else "read_file", path=f"src/f{n}.py") for n, id_ in enumerate(ids)),
    )
    each = size // episode.calls
    results = [result(id_, text_of_size(each, episode.flavour + n, episode.seed + n)) for n, id_ in enumerate(ids)]
    if episode.seed % 5 == 0:
        results[0]["content"] = [{"type": "text", "text": results[0]["content"]}]
    random.Random(episode.seed).shuffle(results)
    return [asked, *results]


def _write(episode: Episode, size: int) -> list[Message]:
    text = text_of_size(size, episode.flavour, episode.seed)
    return [
        assistant(None, call("w", "write_file", path="src/new.py", content=text, mode=0o644)),
        result("w", "written"),
    ]


def _picture(episode: Episode, size: int) -> list[Message]:
    parts = [{"type": "text", "text": text_of_size(size, episode.flavour, episode.seed)}, IMAGE]
    return [{"role": "user", "content": parts[:: 1 if episode.seed % 2 else -1]}]


def _legacy(episode: Episode, size: int) -> list[Message]:
    return [
        {"role": "assistant", "content": None, "function_call": {"name": "lookup", "arguments": '{"q": 1}'}},
        {"role": "function", "name": "lookup", "content": text_of_size(size, episode.flavour, episode.seed)},
    ]


_EXPAND: dict[str, Callable[[Episode, int], list[Message]]] = {
    "ask": lambda e, size: [user(text_of_size(size, e.flavour, e.seed))],
    "say": lambda e, size: [assistant(text_of_size(size, e.flavour, e.seed))],
    "system": lambda e, size: [system(text_of_size(min(size, 10), e.flavour, e.seed))],
    "tools": _tools,
    "write": _write,
    "picture": _picture,
    "legacy": _legacy,
}


def requests(messages: Sequence[Message]) -> list[int]:
    """Return the places at which an application sends the conversation: after user messages and last results."""
    ends = []
    for index, message in enumerate(messages):
        following = messages[index + 1]["role"] if index + 1 < len(messages) else None
        if message["role"] == "user" or (message["role"] in ("tool", "function") and following != message["role"]):
            ends.append(index + 1)
    return ends
