"""Load encodings from local files, never from the network."""

import os
import socket
from pathlib import Path

import pytest

from proxy.errors import ConfigurationError
from proxy.tokens import text as encodings


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "_loaded", {})


@pytest.mark.long
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


def test_a_file_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encodings, "tokenizers", lambda: tmp_path)
    assert encodings.available() == []
    with pytest.raises(ConfigurationError, match="install the dependencies again"):
        encodings.check("o200k_base")


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        *(" " * 1_100_000, "x" + "\u3000" * 200_000 + "x", " a" * 200_000, "\n" * 300_000, "\ud800 a" * 100_000),
        *("\ud83d", "", "x" * encodings.PIECE, "<|endoftext|>" * 20_000, "a" * encodings.SHORT),
    ],
    ids=lambda text: f"{text[:3]!a}-{len(text)}",
)
def test_long_texts_are_counted(text: str) -> None:
    encoding = encodings.encoding("o200k_base")
    pieces = list(encodings._pieces(text))
    assert "".join(pieces) == text
    assert encodings.count(encoding, text) == sum(encodings.count(encoding, piece) for piece in pieces)
