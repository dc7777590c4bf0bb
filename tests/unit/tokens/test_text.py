"""Load encodings from local files, never from the network."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from proxy.errors import ConfigurationError
from proxy.tokens import text as encodings
from tests.kit import fast_counts
from tests.kit.recorded import SESSION

EXAMPLES = settings().max_examples * 10
"""Examples of the property test here. They take less time than others."""


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "_loaded", {})


@pytest.mark.usefixtures("nothing_loaded")
def test_all_that_are_offered_load_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "/nowhere")
    assert {"o200k_base", "cl100k_base"} <= set(encodings.available())
    for name in encodings.available():
        assert not encodings.loaded(name)
        assert encodings.encoding(name).encode("hello world")
        assert encodings.loaded(name)
    assert os.environ["TIKTOKEN_CACHE_DIR"] == "/nowhere"


@pytest.mark.usefixtures("nothing_loaded")
def test_a_damaged_file_is_said_and_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / encodings.FILES["o200k_base"].name
    file.write_bytes(b"damaged")
    monkeypatch.setattr(encodings, "_carried_folder", lambda: tmp_path)
    with pytest.raises(ConfigurationError, match=r"'o200k_base' is damaged"):
        encodings.encoding("o200k_base")
    assert file.read_bytes() == b"damaged"


def test_a_file_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encodings, "_carried_folder", lambda: tmp_path)
    assert encodings.available() == []
    with pytest.raises(ConfigurationError, match="install the dependencies again"):
        encodings.check("o200k_base")


@pytest.mark.parametrize("text", ["<|endoftext|>", "a<|endofprompt|>", "\ud800", "\U0001f600 é", "x", " " * 999])
def test_short_and_long_texts_count_alike(text: str) -> None:
    encoding = encodings.encoding("o200k_base")
    assert encodings.count(encoding, text) == len(encoding.encode(text, disallowed_special=()))


@pytest.fixture
def fast() -> Iterator[None]:
    """Let this thread count with fastokens, and load it."""
    encodings.use_fast()
    for name in encodings.FAST:
        encodings.count(encodings.encoding(name), "x")
    fast_counts.loaded()
    yield
    encodings._here.fast = None


PARTS = [
    *("a", "A", "É", "ǅ", "ʰ", "ª", "中", "ไทย", "ع", "\u0301", "\u200d", "👩\u200d💻", "🇩🇪", "\U000e0fff", "\u0378"),
    *("1", "²", "Ⅷ", "'", "'s", "'LL", "’", "ſ", "K", "_", "/", ".", "<|endoftext|>", "<|start|>", "{", '"', "\0"),
    *(" ", "\n", "\r", "\t", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85", "\ufeff", "\ud800", "\udfff"),
]  # fmt: skip
TEXTS = st.lists(
    st.sampled_from(PARTS)
    | st.text(st.characters(exclude_categories=()), max_size=20)
    | st.builds(lambda part, times: part * times, st.sampled_from(PARTS), st.integers(2, 400)),
    max_size=40,
).map("".join)


def unequal(text: str) -> list[tuple[str, int, int]]:
    """Return the encodings for which fastokens and tiktoken count differently, with both counts."""
    found = []
    for name in encodings.FAST:
        encoding = encodings.encoding(name)
        fast, usual = encodings._fast_count(name, text), len(encoding.encode(text, disallowed_special=()))
        if fast is None:
            assert "ſ" in text or any("\ud800" <= character <= "\udfff" for character in text)
        elif fast != usual:
            found.append((name, fast, usual))
    return found


@fast_counts.needs_fastokens
@pytest.mark.usefixtures("fast")
@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("a'ſ'TV")
@example(" \n \r\n\t a\n  ")
@example("<|endoftext|><|endofprompt|>")
@given(text=TEXTS)
def test_fastokens_and_tiktoken_count_alike(text: str) -> None:
    assert unequal(text) == []


@fast_counts.needs_fastokens
@pytest.mark.usefixtures("fast")
def test_they_count_every_character_alike() -> None:
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and code != 0x17F]
    for start in range(0, len(characters), 5_000):
        some = characters[start : start + 5_000]
        assert unequal("\n".join(some)) == []
        assert unequal("".join(f" {one}a1{one}B" for one in some)) == []


@fast_counts.needs_fastokens
@pytest.mark.usefixtures("fast")
@pytest.mark.skipif(not SESSION.exists(), reason="the recorded session is not at hand")
def test_they_count_recorded_sessions_alike() -> None:
    for path in SESSION.parent.glob("*.json"):
        content = path.read_text(encoding="utf-8")
        for text in (content, json.dumps(content), *content.split("\n")):
            assert unequal(text) == []


@fast_counts.needs_fastokens
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("name", encodings.FILES)
@pytest.mark.parametrize(
    "text",
    [
        *(" " * 1_100_000, "x" + "\u3000" * 1_100_000 + "x", " a" * 600_000, "\n" * 300_000, "\ud800 a" * 100_000),
        *("a'ſ'TV", "\ud83d", "", "x" * encodings.PIECE, "<|endoftext|>" * 20_000, "a" * encodings.SHORT),
    ],
    ids=lambda text: f"{text[:3]!a}-{len(text)}",
)
def test_threads_with_and_without_fastokens_count_alike(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = encodings.encoding(name)
    with_it = encodings.count(encoding, text)
    monkeypatch.setattr(encodings._here, "fast", None)
    assert encodings.count(encoding, text) == with_it
