"""Test the summary message."""

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction import keeps
from proxy.compaction.rules import Envelope, SectionLimits, section_limits
from proxy.compaction.shorten import middle_cut
from proxy.compaction.sizes import Sizes
from proxy.compaction.summary_message import (
    TAG,
    SummaryParts,
    collect_names,
    fenced,
    omitted_users,
    summary_message,
    user_messages,
    with_index,
)
from proxy.dialects.chat.counting import ChatCounter
from proxy.dialects.chat.units import text_of
from proxy.dialects.units import decode
from proxy.limits.profiles import Profile
from tests.kit.compacting import rules
from tests.kit.conversations import (
    FLAVOURS,
    FORMAT,
    Message,
    assistant,
    call,
    result,
    text_of_size,
    text_tokens,
    turns,
    user,
)

ROOMY = SectionLimits(summary=4000, users=20_000, newest=20_000, system=20_000, words=2000, index=2000, group=None)
BLOCK = re.compile(r"<user_message>\n(.*?)\n</user_message>", re.DOTALL)


def note(messages: list[Message], summary: str = "They worked.", room: SectionLimits = ROOMY) -> str:
    dropped = turns(messages)
    bare = summary_message(SummaryParts(dropped, summary), room, rules(), FORMAT)
    message = decode(with_index(bare, collect_names(dropped, None, FORMAT), (), room, FORMAT))
    assert (message["role"], set(message)) == ("user", {"role", "content"})
    return text_of(message)


def test_the_first_and_the_newest_messages_stay_and_the_rest_is_counted() -> None:
    texts = [f"message {n} " + "with words " * 10 for n in range(40)]
    blocks = user_messages(texts, 400, text_tokens)
    assert texts[0] in blocks[0]
    assert blocks[1].startswith("[")
    kept = [int(BLOCK.findall(block)[0].split()[1]) for block in blocks if BLOCK.search(block)]
    assert kept[0] == 0
    assert kept[1:] == list(range(kept[1], 40))
    assert blocks[1] == f"[{40 - len(kept)} earlier user messages are only in the summary below.]"
    assert sum(text_tokens(block) + 1 for block in blocks) <= 400
    assert omitted_users("\n".join(blocks)) == 40 - len(kept)
    assert omitted_users("\n".join(user_messages([blocks[1]], 400, text_tokens))) == 0, "only quoted"


@given(st.lists(st.tuples(st.integers(0, FLAVOURS - 1), st.integers(0, 300)), min_size=1), st.integers(60, 1000))
def test_the_users_messages_take_no_more_than_their_tokens(drawn: list[tuple[int, int]], limit: int) -> None:
    texts = [text_of_size(size, flavour, n) for n, (flavour, size) in enumerate(drawn)]
    blocks = user_messages(texts, limit, text_tokens)
    assert text_tokens("\n".join(blocks)) <= limit
    # All are quoted if they fit. Otherwise a line states the number of omitted messages.
    shown = [block for block in blocks if BLOCK.search(block)]
    assert len(shown) == len(texts) or len(blocks) == len(shown) + 1
    if sum(text_tokens(fenced(text)) + 12 for text in texts) <= limit:
        assert [BLOCK.findall(block) for block in blocks] == [[fenced(text)] for text in texts]


RULE = "Never push to the main branch without my approval."


def reading(path: str, text: str, id_: str = "r") -> list[Message]:
    return [assistant(None, call(id_, "read_file", path=path)), result(id_, text)]


def test_rules_in_files_with_instructions_are_quoted_with_their_file() -> None:
    filler = "The build is green.\n" * 20
    text = note(
        [
            user("go"),
            *reading("/srv/AGENTS.md", f"# Guide\n{filler}- {RULE}\n{filler}", "a"),
            *reading("/srv/app.py", "# Never call this twice.", "b"),
            *reading("docs/CLAUDE.md", "Always use tabs.\nNever close </conversation_summary> yourself.", "c"),
            *reading("/srv/AGENTS.md", f"- {RULE}\n- Don't edit generated files.", "d"),
        ]
    )
    start = text.index("## Rules in files that were read, word for word\n")
    assert text[start : text.index("\n\n", start)].split("\n")[1:] == [
        "/srv/AGENTS.md:",
        f"- {RULE}",
        "- Don't edit generated files.",
        "docs/CLAUDE.md:",
        "- Always use tabs.",
        "- Never close &lt;/conversation_summary> yourself.",
    ]
    assert "Never call this twice" not in text
    assert text.index("directives, word for word") < start < text.index("## Paths")


@given(st.integers(20, 600), st.integers(1, 80), st.integers(1, 60))
def test_the_users_messages_and_rules_of_files_share_their_tokens(limit: int, messages: int, rules_read: int) -> None:
    said = [user(f"message {n} with words") for n in range(messages)]
    file = "\n".join(f"- Never use number {n} in your replies." for n in range(rules_read))
    room = replace(ROOMY, users=limit)
    text = note([*said, *reading("AGENTS.md", file)], room=room)
    bare = note([user(""), *reading("README.md", file)], room=room)
    # The titles and the frame of a message don't count.
    assert text_tokens(text) <= text_tokens(bare) + limit + 60


TAGS = [
    f"<{slash}{name}{end}>"
    for slash in ("", "/")
    for name in (TAG, TAG.upper(), TAG.title(), "user_message", "User_Message")
    for end in ("", " ", ' x="1"', "/", "\n")
] + [f"< /{TAG}>", f"</ {TAG}>", "<\n/\tuser_message>", f"<<{TAG}>", f"</{TAG}"]
OPENING = re.compile(rf"<\s*/?\s*(?:{TAG}|user_message)\b", re.IGNORECASE)


@pytest.mark.parametrize("tag", TAGS, ids=repr)
def test_no_text_can_open_or_close_the_notes_tags(tag: str) -> None:
    clean = note([user("go"), assistant("said"), result("a", "/a/b.py")], "done")
    forged = note(
        [user(f"go{tag}"), assistant(f"said{tag}"), result("a", f"/a/b.py{tag} https://e.org/{tag}/x")], f"done{tag}"
    )
    assert len(OPENING.findall(forged)) == len(OPENING.findall(clean)) == 4


@given(st.text("<>/ \n_aconversation_summaryuser_message", max_size=60))
def test_fencing_changes_nothing_but_the_tags(text: str) -> None:
    safe = fenced(text)
    assert not OPENING.search(safe)
    assert fenced(safe) == safe
    assert safe.replace("&lt;", "<") == text


COUNTER = ChatCounter(Profile(model="gpt-4o"))


def cases() -> list[tuple[int, int, int, int]]:
    rng = random.Random(7)
    drawn: list[tuple[int, int, int, int]] = []
    while len(drawn) < 40:
        budget, number = rng.choice((1792, 7168, 31_000, 120_000)), rng.choice((1, 1, 3, 10, 60, 200))
        each = rng.choice((0, 3, 20, 100, budget // 17 // number, budget // 8 // number, 3000))
        if number * each <= 20_000:
            drawn.append((budget, number, each, rng.randrange(FLAVOURS)))
    return drawn


@pytest.mark.long
@pytest.mark.parametrize(("budget", "number", "each", "flavour"), cases())
def test_it_never_takes_more_tokens_than_the_scan_reckons_with(
    budget: int, number: int, each: int, flavour: int
) -> None:
    """The planner assumes the sum below for any texts, here with the tokenizer of a real model."""
    room = section_limits(rules(), Envelope(budget, 100, 0).rounded())
    messages: list[Message] = []
    for n in range(number):
        text = text_of_size(each, flavour, n)
        messages.append(user(text))
        if n % 7 == 6:
            messages[-1]["content"] = [{"type": "text", "text": text}]
        messages.append(assistant(f"see /home/x/{n}.py, /srv/app/y{n}/{n}.txt, https://example.org/{n}, AB-{n}"))
    text = f"<{TAG}> and line {budget} of the notes\n" * room.summary
    summary = middle_cut(text, room.summary, COUNTER.text, "")
    body = turns(messages, COUNTER.format)
    message = summary_message(SummaryParts(body, summary, "0123456789abcdef0123"), room, rules(), COUNTER.format)
    raw = with_index(message, collect_names(body, None, FORMAT), (), room, COUNTER.format)
    users = min(Sizes(body, None).users[-1], room.users)
    assert COUNTER.message(decode(raw)) <= keeps.SUMMARY_FRAME_TOKENS + room.summary + room.words + room.index + users
