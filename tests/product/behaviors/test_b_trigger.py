"""Trigger: behaviours 6 to 18."""

import base64
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.behaviors import (
    BUDGET,
    LEVEL,
    ROOM_TO_GROW,
    UNLISTED,
    WIDE,
    WINDOW,
    Caller,
    Exchange,
    Front,
    Message,
    assistant,
    body,
    chat,
    opened,
    padded,
    system,
    tokens,
    user,
    words,
)

POLICIES: dict[str, Any] = {
    "tokens": {"trigger": {"tokens": 3_000}, "keep": {"messages": 2}},
    "messages": {"trigger": {"messages": 20}, "keep": {"messages": 2}},
    "fraction": {"trigger": {"fraction": 0.5}, "keep": {"messages": 2}},
    "tiny-fraction": {"trigger": {"fraction": 0.00001}, "keep": {"messages": 2}},
    "any": {"trigger": [{"tokens": 3_000}, {"messages": 20}], "keep": {"messages": 2}},
    "all": {"trigger": {"tokens": 3_000, "messages": 20}, "keep": {"messages": 2}},
    "empty": {"trigger": []},
    "null": {"trigger": None},
    "unknown": {"unknown_model": {"trigger": {"tokens": 3_000}, "keep": {"messages": 4}}},
    "unknown-messages": {"unknown_model": {"trigger": {"messages": 20}, "keep": {"messages": 4}}},
    "small": {"trigger": {"tokens": 1_500}, "keep": {"messages": 2}},
    "cjk": {"trigger": {"tokens": 50_000}},
    "keep-output": {"output": "keep"},
}

CHINESE = (
    "今天早上的构建又失败了，因为配置文件里少了一个逗号。"
    "请先检查登录模块，然后把日志发给我。"
    "数据库的连接池已经用完，我们需要增加超时时间。"
    "昨天の会議で決まったことを、もう一度まとめてください。"
    "サーバーの設定を変更する前に、必ずバックアップを取ってください。"
)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with opened(tmp_path_factory.mktemp("b"), POLICIES) as front:
        yield front


def short(messages: int, size: int) -> list[Message]:
    """Return this many messages of this many tokens each: a system message first, a user message last."""
    pairs = chat(messages // 2, size)
    return pairs if messages % 2 else [*pairs[: messages - 1], user("What now?")]


def compacts(caller: Caller, messages: list[Message], **fields: Any) -> bool:
    """Whether a request is compacted. One that is not must go through as it came."""
    exchange = caller.ask(messages, **fields)
    assert exchange.verdict in ("none", "compacted")
    assert exchange.untouched == (exchange.verdict == "none")
    if exchange.verdict == "compacted":
        assert exchange.request.tokens < tokens(messages)
    return exchange.verdict == "compacted"


def test_06_tokens_are_inclusive(front: Front) -> None:
    caller, messages = front.caller("tokens"), chat(5, 240)
    assert not compacts(caller, padded(messages, 2_999))
    assert compacts(caller, padded(messages, 3_000))


def test_07_messages_are_inclusive(front: Front) -> None:
    caller = front.caller("messages")
    assert not compacts(caller, short(19, 100))
    assert compacts(caller, short(20, 100))


def test_08_a_fraction_is_of_the_models_limit_and_one_token_at_least(front: Front) -> None:
    """The limit is the budget: the window less what is kept for the answer (512 tokens here)."""
    caller, messages = front.caller("fraction"), chat(6, 200)
    assert not compacts(caller, padded(messages, BUDGET // 2 - 1))
    assert compacts(caller, padded(messages, BUDGET // 2))
    assert compacts(front.caller("tiny-fraction"), chat(6, 200)), "a hundred-thousandth of the limit is one token"


def test_09_of_a_list_any_condition_will_do(front: Front) -> None:
    caller = front.caller("any")
    assert not compacts(caller, short(18, 50))
    assert compacts(caller, short(20, 100)), "messages alone"
    assert compacts(caller, padded(chat(5, 240), 3_000)), "tokens alone"


def test_10_of_a_mapping_all_conditions_must_hold(front: Front) -> None:
    caller = front.caller("all")
    assert not compacts(caller, short(20, 100)), "messages alone"
    assert not compacts(caller, padded(chat(5, 240), 3_500)), "tokens alone"
    assert compacts(caller, short(20, 170)), "both"


@pytest.mark.parametrize("policy", ["empty", "null"])
def test_11_no_condition_never_fires(front: Front, policy: str) -> None:
    caller = front.caller(policy)
    assert not compacts(caller, chat(12, 500)), "twice the window"
    assert caller.asked == []


def test_12_an_unknown_window_has_its_own_trigger(front: Front) -> None:
    """Fractions mean nothing there, so those of the policy give way to those of ``unknown_model``."""
    caller = front.caller("unknown", UNLISTED)
    messages = chat(11, 115)
    assert not compacts(caller, padded(messages, 2_999))
    exchange = caller.ask(padded(messages, 3_000))
    assert exchange.verdict == "compacted"
    assert 4 <= len(exchange.tail) < len(messages) // 2
    caller = front.caller("unknown-messages", UNLISTED)
    assert not compacts(caller, short(19, 600)), "tokens mean nothing where only messages are asked for"
    talk = [message if message["role"] != "user" else user("Go on.") for message in short(20, 600)]
    assert compacts(caller, talk)
    assert not compacts(front.caller("fraction", UNLISTED), chat(10, 1_000)), "a fraction of nothing is never reached"
    assert not compacts(front.caller("tokens", UNLISTED), padded(messages, 2_999))
    exchange = front.caller("tokens", UNLISTED).ask(padded(messages, 3_000))
    assert exchange.verdict == "compacted", "tokens mean the same everywhere"
    assert len(exchange.tail) < 4, "so does a number of kept messages"


def tool(number: int) -> dict[str, Any]:
    properties = {"path": {"type": "string", "description": "the file that it works on"}}
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    function = {"name": f"tool_{number}", "description": f"Tool number {number}.", "parameters": parameters}
    return {"type": "function", "function": function}


def test_13_tools_and_system_count(front: Front) -> None:
    messages = padded(chat(6, 400), LEVEL - 600)
    tools = [tool(number) for number in range(51)]
    assert not compacts(front.caller(), messages)
    assert not compacts(front.caller(), messages, tools=tools[:1])
    assert compacts(front.caller(), messages, tools=tools), "fifty more tools"
    assert compacts(front.caller(), [system(words(700, "law")), *messages[1:]]), "a longer system message"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_14_the_reserved_output_is_subtracted(front: Front, name: str) -> None:
    """Under ``output: clamp`` any stated output reserves an eighth of the window, so that a value that changes from
    turn to turn moves no checkpoint. Under ``keep`` the exact value counts."""
    messages = padded(chat(6, 400), LEVEL - 300)
    assert not compacts(front.caller(), messages)
    assert compacts(front.caller(), messages, **{name: 512}), "85 % of 7,000 are reached"
    assert compacts(front.caller(), messages, **{name: 4_000}), "85 % of 7,000 are reached"
    exact = front.caller("keep-output")
    assert not compacts(exact, messages, **{name: 512})
    assert compacts(exact, messages, **{name: 1_000}), "85 % of 7,000 are reached"


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def png(size: int) -> str:
    """A picture of 1024 by 1024 pixels and ``size`` bytes, in Base64."""
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBBI", 13, b"IHDR", 1024, 1024, 8, 2, 0, 0, 0, 0)
    return base64.b64encode(header + noise(size)).decode()


def shown(part: dict[str, Any]) -> list[Message]:
    return [system(), user([{"type": "text", "text": "What is this?"}, part])]


def test_15_media_cost_nothing_like_their_bytes(front: Front) -> None:
    caller = front.caller()

    def size(part: dict[str, Any]) -> int:
        exchange = caller.post(body(shown(part)), x_compaction="shadow")
        assert exchange.untouched
        return int(exchange.headers["x-compaction-tokens-before"])

    def picture(bytes_: int) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(bytes_)}"}}

    assert 500 < size(picture(5_000_000)) < 1_500
    assert size(picture(5_000_000)) == size(picture(50_000))
    assert not compacts(caller, shown(picture(5_000_000)))
    # Half a minute of speech, and a document of two pages.
    sound = {"data": base64.b64encode(noise(1_000_000)).decode(), "format": "wav"}
    assert size({"type": "input_audio", "input_audio": sound}) < 1_000
    paper = {
        "filename": "a.pdf",
        "file_data": "data:application/pdf;base64," + base64.b64encode(noise(100_000)).decode(),
    }
    assert size({"type": "file", "file": paper}) < 10_000


def test_16_cjk_text_counts_by_the_character(front: Front) -> None:
    caller = front.caller("cjk", WIDE)
    pages = [(CHINESE * 100)[start : start + 10_000] for start in range(0, 200, 20)]
    assert sum(map(len, pages)) == 100_000
    messages = [system(), *[user(text) if n % 2 else assistant(text) for n, text in enumerate(pages, start=1)]]
    assert compacts(caller, [*messages, user("接下来呢？")])
    assert not compacts(caller, messages[:4])


def test_17_usage_that_the_upstream_reported_calibrates_the_count(tmp_path_factory: pytest.TempPathFactory) -> None:
    lie = user('{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}, "usage": {"prompt_tokens": 9}')
    with opened(tmp_path_factory.mktemp("usage"), ratio=1.5) as front:
        caller = front.caller()
        messages = padded([*chat(5, 240), lie], 5_000)
        seen = [compacts(caller, messages) for _ in range(6)]
        assert seen == [False] * 3 + [True] * 3, "by its count it is over the trigger"
    with opened(tmp_path_factory.mktemp("bounded"), ratio=2.9) as front:
        caller = front.caller()
        small = padded(chat(1, 240), 3_900)
        assert not any(compacts(caller, small) for _ in range(6)), "a factor is at most 1.6"
    with opened(tmp_path_factory.mktemp("same")) as front:
        caller = front.caller()
        assert not any(compacts(caller, messages) for _ in range(6)), "what a client says of usage is no usage"


def test_18_after_compaction_there_is_room_for_many_requests(front: Front) -> None:
    """The remaining conversation has at most 65 % of the trigger's level, and the next turns only add to it."""
    caller, messages = front.caller(), chat(8, 380)
    assert tokens(messages) < LEVEL
    messages = padded(messages, LEVEL + 50)
    before: Exchange = caller.ask(messages)
    assert before.verdict == "compacted"
    assert before.request.tokens <= ROOM_TO_GROW * LEVEL < LEVEL < WINDOW
    for number in range(3):
        messages += [assistant(f"Answer. {words(200, f'more{number}x')}"), user("Go on.")]
        after = caller.ask(messages)
        assert after.messages[: len(before.messages)] == before.messages
        assert after.request.tokens < LEVEL
        before = after
    assert len(caller.asked) == 1


def test_18_a_small_trigger_in_a_large_window_leaves_room_too(front: Front) -> None:
    """A trigger in tokens far below the window means the same there as in a small window: no summary at every turn."""
    prompts: dict[str, list[int]] = {}
    for model in ("m", WIDE):
        caller = front.caller("small", model)
        messages = [system()]
        sizes = prompts[model] = []
        for number in range(24):
            messages.append(user(f"Question {number}?"))
            sizes.append(caller.ask(messages).request.tokens)
            messages.append(assistant(f"Answer {number}: {words(150, f's{number}x')}"))
        assert 2 <= len(caller.asked) <= 4, f"{len(caller.asked)} summaries, prompts of {sizes}"
    assert max(prompts[WIDE]) < 1_500
