"""Test transcripts: their entries, redaction, and chunks."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction import keeps
from proxy.compaction.format import Format, TextCounter
from proxy.compaction.turn import Turn
from proxy.config.policy import SummarySettings
from proxy.summary import prompt
from proxy.summary.prompt import Clean, Redaction, language_sample, request_messages
from proxy.summary.quality import SummaryFailed, SummaryRejected, Written
from proxy.summary.writer import SummaryTask
from proxy.summary.writers import PARALLEL, chunks, newest, write
from tests.kit.summary_conversation import FORMAT, calling, turn, words


def entries(turns: Sequence[Turn], format: Format, clean: Clean | None = None) -> list[str]:
    """Return the texts of the messages."""
    return [text for _, text in prompt.entries(turns, format, clean)]


GERMAN = "Bitte repariere den Build."


@pytest.mark.parametrize(
    ("texts", "sample"),
    [
        (["Please help.", f"  {GERMAN}  "], f"{GERMAN}\nPlease help."),
        ([GERMAN, "42 ...", [{"type": "image_url", "image_url": {}}], None], GERMAN),
        ([f"mot {'x' * 200} fin"], f"mot {'x' * 56} … {'x' * 56} fin"),
        (["x</language_sample>y"], "x&lt;/language_sample>y"),
        ([f"<reminder id='1'>Use it.</reminder>{GERMAN}\n```\nprint(1)\n```"], GERMAN),
        ([f'Traceback (most recent call last):\n  File "a.py", line 1\nE: no\n\n{GERMAN}'], GERMAN),
        ([f"a < b and <unclosed>\n{GERMAN}"], f"a < b and <unclosed>\n{GERMAN}"),
    ],
)
def test_the_language_is_that_of_the_users_own_words(texts: list[object], sample: str) -> None:
    turns = [*(turn("user", text) for text in texts), turn("assistant", "Yes."), turn("tool", "ok", tool_call_id="a")]
    assert language_sample(turns, FORMAT) == sample
    assert language_sample(turns[-2:], FORMAT) is None


@pytest.mark.parametrize(
    ("long", "limit"),
    [
        (turn("tool", "word " * 10_000), keeps.RESULT_CHARACTERS),
        (calling("t", "word " * 10_000), keeps.ARGUMENT_CHARACTERS),
        (turn("user", "word " * 20_000), keeps.TEXT_CHARACTERS),
    ],
)
def test_long_pieces_keep_their_ends(long: Turn, limit: int) -> None:
    (text,) = entries([long], FORMAT)
    assert limit * 0.7 < len(text) < limit + 100
    assert "characters left out" in text
    assert text.rstrip().endswith("word")


@pytest.mark.parametrize(
    "tag", ["</transcript>", "<TRANSCRIPT>", "< / transcript >", "</previous_summary>", "<previous_summary x>"]
)
def test_no_message_can_end_the_transcript(tag: str) -> None:
    for one in (turn("user", f"a{tag}b"), turn("tool", f"a{tag}b"), calling("t", f"a{tag}b"), calling(f"t{tag}", "")):
        (text,) = entries([one], FORMAT)
        assert tag not in text
        assert tag[1:] in text


# Put together here, so that no scanner of repositories takes them for real ones.
LETTERS = "aB3dE5gH7jK9mN1pQ2sT4vW6xY8zA0cD"
JWT = "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
PEM = "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIEpAIBAAKCAQEA" + "x7Zk" * 12 + "\n-----END RSA PRIVATE" + " KEY-----"

SECRETS = [
    ("the key is sk-" + LETTERS, "sk-" + LETTERS),
    ("sk-proj-" + LETTERS + "_-" + LETTERS, LETTERS),
    ("use 'sk-ant-api03-" + LETTERS + "'", LETTERS),
    ("aws: AKIA" + "IOSFODNN7EXAMPLE", "IOSFODNN7"),
    ("xoxb-" + "123456789012-" + LETTERS, LETTERS),
    ("sk_live_" + LETTERS, LETTERS),
    ("Bearer " + JWT, "dozjgNry"),
    ("cookie " + JWT + " end", "eyJzdWIi"),
    (json.dumps({"arguments": json.dumps({"key": PEM})}), "x7Zkx7Zk"),
    ("password=hunter2", "hunter2"),
    ("password=123456", "123456"),
    ("api_key: " + LETTERS, LETTERS),
    ("export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "K7MDENG"),
    ("  clientSecret: opensesame\n  port: 80", "opensesame"),
    ("config['token'] = 'opensesame'", "opensesame"),
    ("x-api-key: " + LETTERS.lower(), LETTERS.lower()),
    ("GET /file?id=3&access_token=" + LETTERS + "&page=2", LETTERS),
    ("mysql --password opensesame -h db", "opensesame"),
]


@pytest.mark.parametrize(("text", "secret"), SECRETS, ids=[text[:30] for text, _ in SECRETS])
def test_a_secret_is_blacked_out(text: str, secret: str) -> None:
    assert secret in text
    cleaned = Redaction(secrets=True)(text)
    assert secret not in cleaned
    assert "[redacted]" in cleaned
    assert Redaction(secrets=True)(cleaned) == cleaned, "once is enough"


def test_what_stands_beside_a_secret_stays() -> None:
    clean = Redaction(secrets=True)
    assert clean("DB_PASSWORD=correcthorse\nDB_HOST=db.internal") == "DB_PASSWORD=[redacted]\nDB_HOST=db.internal"
    assert clean("postgres://app:opensesame@db.internal:5432/shop") == "postgres://app:[redacted]@db.internal:5432/shop"
    assert clean('{"password": "s3cr\\"et!", "port": 5432}') == '{"password": "[redacted]", "port": 5432}'
    assert clean("-H 'Authorization: Bearer " + LETTERS + "' x") == "-H 'Authorization: Bearer [redacted]' x"
    assert clean("before\n" + PEM + "\nafter") == "before\n[redacted]\nafter"
    assert clean('{"text": "PASSWORD=hunter2\\nPORT=5432"}') == '{"text": "PASSWORD=[redacted]\\nPORT=5432"}'
    assert clean("?id=3&access_token=" + LETTERS + "&page=2") == "?id=3&access_token=[redacted]&page=2"


@pytest.mark.parametrize(
    "text",
    [
        "commit 0485b0d2f1c7a9e3b6d8f0a1c2e4d6f8a0b1c3d5 on main",
        "id 550e8400-e29b-41d4-a716-446655440000",
        "max_tokens=4096, prompt_tokens: 1234, total_tokens: 99999",
        "The password must have eight characters, and a token lasts an hour.",
        "self._api_key = api_key\nself.password = user_password",
        '{"password": "", "token": null, "secret": true}',
        '{"token": {"type": "string"}, "password": {"type": "string", "minLength": 8}}',
        "https://api.example.com:8443/v1/items?page=2&sort_key=created",
        "Use a bearer authentication-scheme-of-some-kind instead of basic things",
        "-----BEGIN CERTIFICATE-----\nMIIDdzCCAl+gAwIBAgIE\n-----END CERTIFICATE-----",
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redaction(secrets=True)(text) == text


def test_a_policys_own_expressions() -> None:
    clean = Redaction(secrets=False, patterns=[r"ACME-\d+", r"(?i)project \w+", r"(?=Zeus)"])
    assert clean("ACME-12 and Project Zeus, Zeus") == "[redacted] and [redacted], Zeus"
    assert clean("password=hunter2") == "password=hunter2"
    both = Redaction(secrets=True, patterns=[r"ACME-\d+"])
    assert both("ACME-12 password=hunter2") == "[redacted] password=[redacted]"


@pytest.mark.long
@pytest.mark.parametrize(
    "unit",
    ["password", "password=", "password: a.b", "token = ", "sk-", "sk-a_", "eyJ", "eyJaaaaaaaaa.", "://a:", "?token=",
     "--token ", "-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\n-", "Bearer ", "bearer a", "curl -u ",
     'secret="', "\\\\", "api_", "a", "1", "authorization: x ", "password: a a a a ", "AKIA", "://", "key=",
     '"password": "\\"'],
)  # fmt: skip
def test_the_time_is_linear_in_the_text(unit: str) -> None:
    clean = Redaction(secrets=True)
    text = unit * (40_000 // len(unit))
    started = time.thread_time()
    clean(text)
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize("text", ["PASSWORD=Hunter22", "Api-Key: " + LETTERS, "AUTHORIZATION: BEARER " + LETTERS])
def test_whatever_the_case_of_the_name(text: str) -> None:
    assert Redaction(secrets=True)(text).endswith("[redacted]")


Answer = Callable[[int, str], Written]


def brief(number: int, prompt: str) -> Written:
    return Written(f"notes {number}", "stop")


class Model:
    """Answers as it is told, and keeps what it was asked."""

    def __init__(self, input_limit: int | None = None, answer: Answer = brief) -> None:
        self.input_limit = input_limit
        self.count: TextCounter = words
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0
        self._answer = answer

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int) -> Written:
        self.asked.append(messages[-1]["content"])
        number = len(self.asked)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await asyncio.sleep(0)
            return self._answer(number, messages[-1]["content"])
        finally:
            self.at_once -= 1


def talk(number: int, each: int = 100) -> list[Turn]:
    return [turn("assistant", f"begin{n} " + "word " * (each - 2) + f"end{n}") for n in range(number)]


def summary(turns: Sequence[Turn], model: Model, *, max_tokens: int = 200, **fields: Any) -> str:
    settings = SummarySettings(
        **{name: fields.pop(name) for name in ("prompt", "trim_tokens_to_summarize") if name in fields}
    )
    given = {"previous": None, "max_tokens": max_tokens, "settings": settings, **fields}
    return asyncio.run(write(SummaryTask(turns=turns, format=FORMAT, **given), model))


def transcript(prompt: str) -> str:
    return prompt.partition("<transcript>\n")[2].partition("\n</transcript>")[0]


def test_one_call_where_everything_fits() -> None:
    model = Model(input_limit=100_000)
    assert summary(talk(10), model, previous="Old notes.") == "notes 1"
    (prompt,) = model.asked
    assert "<previous_summary>\nOld notes.\n</previous_summary>" in prompt
    assert all(f"begin{n} " in prompt and f"end{n}" in prompt for n in range(10))


def test_what_exceeds_the_models_window_is_summarised_in_chunks_and_merged() -> None:
    model = Model(input_limit=2000)
    assert summary(talk(60), model, previous="Old notes.") == f"notes {len(model.asked)}"
    *parts, merged = model.asked
    assert len(parts) == 5
    assert all(words(prompt) <= 2000 for prompt in model.asked)
    assert not any("Old notes." in prompt for prompt in parts)
    assert "Old notes." in merged
    assert [n for prompt in parts for n in range(60) if f"begin{n} " in prompt] == list(range(60))
    assert transcript(merged).split("\n\n") == [f"[notes on part {n}] notes {n}" for n in range(1, 6)]
    assert 1 < model.most_at_once <= PARALLEL


def test_notes_that_are_still_too_long_are_chunked_again() -> None:
    model = Model(input_limit=2000, answer=lambda number, prompt: Written(f"n{number} " + "note " * 150, "stop"))
    text = summary(talk(200), model)
    assert text.startswith(f"n{len(model.asked)} note")
    assert all(words(prompt) <= 2000 for prompt in model.asked)


def test_a_failure_of_one_chunk_ends_the_others() -> None:
    def answer(number: int, prompt: str) -> Written:
        raise SummaryFailed("status 500")

    model = Model(input_limit=2000, answer=answer)
    with pytest.raises(SummaryFailed, match="500"):
        summary(talk(200), model)
    # The whole would be 17 chunks; those that had begun are ended.
    assert len(model.asked) <= 2 * PARALLEL
    assert model.at_once == 0


def test_a_summary_must_be_smaller_than_all_that_it_stands_for() -> None:
    """That is the earlier notes and what came since."""
    long = Model(input_limit=100_000, answer=lambda number, prompt: Written("note " * 150, "stop"))
    with pytest.raises(SummaryRejected, match="isn't smaller"):
        summary(talk(1), long)
    assert summary(talk(1), long, previous="old " * 100)


def test_nothing_that_is_asked_holds_a_secret() -> None:
    """Neither the transcript nor the earlier notes nor notes on parts."""
    model = Model(
        input_limit=2000, answer=lambda number, prompt: Written("The password=opensesame7 is theirs.", "stop")
    )
    turns = [*talk(20), turn("user", "My password=opensesame7, please."), *talk(20)]
    summary(turns, model, previous="password=opensesame7", redact=Redaction(secrets=True))
    assert len(model.asked) > 2
    assert "notes on part 1" in model.asked[-1]
    assert not any("opensesame7" in prompt for prompt in model.asked)
    assert all(
        "Here are words of the user's last messages" in prompt and "My password=[redacted]" in prompt
        for prompt in model.asked
    )
    open_model = Model(input_limit=None)
    summary(turns, open_model, previous="password=opensesame7")
    assert open_model.asked[0].count("opensesame7") == 3


@given(st.lists(st.integers(1, 400), max_size=30), st.integers(100, 500))
def test_chunks_hold_everything_in_order_and_none_is_too_large(sizes: list[int], limit: int) -> None:
    texts = [f"t{n} " + "word " * (size - 1) for n, size in enumerate(sizes)]
    parts = chunks(texts, [words(text) for text in texts], limit, words)
    assert [text.split()[0] for part in parts for text in part] == [f"t{n}" for n in range(len(sizes))]
    assert all(words(" ".join(part)) <= limit for part in parts)
    assert all(text in texts or words(texts[n]) > limit for n, text in enumerate(t for part in parts for t in part))
    # A chunk ends only when the next text doesn't fit. A text that was cut counts as a whole chunk.
    charged = [[words(text) if text in texts else limit for text in part] for part in parts]
    assert all(sum(one) + other[0] > limit for one, other in pairwise(charged))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(30, 500))
def test_the_newest_texts_within_a_limit(sizes: list[int], limit: int) -> None:
    texts = [f"t{n} " + "word " * (size - 1) for n, size in enumerate(sizes)]
    kept, kept_sizes = newest(texts, sizes, limit, words)
    assert kept
    assert len(kept) == len(kept_sizes)
    assert words(" ".join(kept)) <= limit
    if len(kept) < len(texts) and kept == texts[-len(kept) :]:
        assert sum(sizes[-len(kept) - 1 :]) > limit


def test_a_policys_own_prompt_replaces_all_wording() -> None:
    template = "Sum up {messages} in {braces}."
    assert request_messages(["a {x}", "b"], max_tokens=9, template=template) == [
        {"role": "user", "content": "Sum up a {x}\n\nb in {braces}."}
    ]
    with_notes = request_messages(["a"], max_tokens=9, template=template, previous="old")
    assert with_notes[0]["content"] == "Sum up [notes on earlier messages] old\n\na in {braces}."
