"""Count images, audio, and files by their size and length, not by their bytes."""

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.settings import Clause
from proxy.compaction.stages.media import MediaRules, MediaStage
from proxy.compaction.turn import Turn
from proxy.dialects.chat.counting import ChatCounter
from proxy.limits.profiles import Profile
from proxy.tokens import encoding, has_remote_media
from proxy.tokens.media import MEDIA, MEDIA_LABELS, Media

encoding("o200k_base")


def png(width: int, height: int, padding: int = 0) -> bytes:
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + struct.pack(">II", width, height)
    return header + b"\x08\x06\x00\x00\x00" + bytes(4) + bytes(padding)


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def image(url: object, detail: object = None) -> dict[str, Any]:
    value: dict[str, Any] = {"url": url}
    return {"type": "image_url", "image_url": value if detail is None else {**value, "detail": detail}}


def tokens(family: str, part: dict[str, Any]) -> int:
    return Media(family).tokens(part["type"], part, len)


# Sources of the sizes:
# - OpenAI, "Images and vision": tiles for 1024 square and 2048 × 4096, patches for 1024 square and 1800 × 2400.
# - Anthropic, "Vision": 1000 square and 1092 square.
# - Google, "Understand and count tokens": 384 square and 960 × 540.
GUIDES = [
    ("gpt-4o", (1024, 1024), "high", 765),
    ("gpt-4o", (2048, 4096), "high", 1105),
    ("gpt-4o", (4096, 8192), "low", 85),
    ("o-series", (1024, 1024), "auto", 75 + 4 * 150),
    ("gpt-5", (1024, 1024), "auto", 70 + 4 * 140),
    ("gpt-4.1-mini", (1024, 1024), "auto", 1659),
    ("gpt-4.1-mini", (1800, 2400), "auto", 2353),
    ("o4-mini", (1024, 1024), "auto", 1762),
    ("gpt-5.4", (1600, 1600), "high", 3000),
    ("claude", (1000, 1000), "auto", 1334),
    ("claude", (1092, 1092), "auto", 1590),
    ("gemini", (384, 384), "auto", 258),
    ("gemini", (960, 540), "auto", 6 * 258),
]


@pytest.mark.parametrize(("family", "size", "detail", "expected"), GUIDES)
def test_the_providers_examples(family: str, size: tuple[int, int], detail: str, expected: int) -> None:
    assert tokens(family, image(data_url(png(*size)), detail)) == expected


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png",
        "data:image/png;base64,",
        "data:image/png;base64,!!!!",
        "data:image/png;base64,AAAA",
        "data:image/svg+xml;base64,PHN2ZyB3aWR0aD0iMSIgaGVpZ2h0PSIxIi8+",
        data_url(png(0, 0)),
        data_url(png(2**31 - 1, 1)),
        data_url(b"\xff\xd8" + bytes(100)),
        "data:",
        "",
        None,
        7,
    ],
)
def test_what_is_not_known_costs_the_most(url: object) -> None:
    assert tokens("gpt-4o", image(url)) == 85 + 8 * 170
    assert tokens("gpt-4o", image(url, "low")) == 85


@given(st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF1234WEBP", b"BM"]), st.binary())
def test_damaged_images_are_counted(magic: bytes, rest: bytes) -> None:
    assert 85 <= tokens("gpt-4o", image(data_url(magic + rest))) <= 85 + 8 * 170


def wav(seconds: float, rate: int = 48_000) -> str:
    body = bytes(int(seconds * rate))
    header = b"RIFF" + bytes(4) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, rate // 2, rate, 2, 16)
    return base64.b64encode(header + b"data" + bytes(4) + body).decode()


def sound(data: object, form: object = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


def test_sound_costs_its_length() -> None:
    assert 600 <= tokens("gpt-4o", sound(wav(60))) <= 605
    assert 32 * 60 <= tokens("gemini", sound(wav(60))) <= 32 * 61
    assert tokens("gpt-4o", sound("A" * 20_000_000, "mp3")) <= 36_001
    assert tokens("gpt-4o", sound(None)) == 36_001
    assert tokens("gpt-4o", sound(wav(1, rate=1))) < 40_000


def test_files_are_bounded() -> None:
    pdf = data_url(b"%PDF" + bytes(1_000_000), "application/pdf")
    small = tokens("gpt-4o", {"type": "file", "file": {"filename": "a.pdf", "file_data": pdf}})
    assert small == 21 * 2500 + len("a.pdf")
    huge = data_url(bytes(9_000_000), "application/pdf")
    assert tokens("gpt-4o", {"type": "file", "file": {"file_data": huge}}) == 250_000
    assert tokens("gpt-4o", {"type": "file", "file": {"file_id": "file-1"}}) == 25_000
    note = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "ten chars."}}
    assert tokens("claude", note) == 10


anything = st.none() | st.booleans() | st.integers() | st.text() | st.dictionaries(st.text(max_size=5), st.text())


@given(
    st.sampled_from(sorted(MEDIA)), st.dictionaries(st.sampled_from(["url", "data", "source", "file_data"]), anything)
)
def test_odd_parts_are_counted(kind: str, value: dict[str, Any]) -> None:
    assert 0 < tokens("gpt-4o", {"type": kind, kind: value}) < 2_000_000


@pytest.mark.parametrize("kind", sorted(MEDIA_LABELS))
def test_each_kind_of_media_is_counted_by_its_kind_and_can_be_removed(kind: str) -> None:
    value = f"data:application/octet-stream;base64,{base64.b64encode(bytes(150_000)).decode()}"
    message = {"role": "user", "content": [{"type": kind, kind: {"data": value}}, {"type": "text", "text": "Look."}]}
    counter = ChatCounter(Profile("m", tokenizer="o200k_base"))
    raw = json.dumps(message).encode()
    turn = Turn(raw, counter.format.read(raw))
    assert turn.facts.media
    assert turn.facts.tokens < 15_000, "not its base64"
    assert has_remote_media(raw)
    reduced = MediaStage(MediaRules((), Clause(messages=1)), counter.format, archive=False).reduce(0, turn)
    assert reduced is not None
    assert f": {MEDIA_LABELS[kind]}." in reduced.raw.decode()
    assert reduced.facts.tokens < 100


def test_remote_media_is_seen_in_the_bytes() -> None:
    for kind in MEDIA:
        assert has_remote_media(b'{"content": [{"type": "%s"}]}' % kind.encode())
        assert has_remote_media(b'{"content":[{"type":"%s"}]}' % kind.encode())
    assert has_remote_media(b'{"role":"assistant","audio":{"id":"audio_1"}}')
    assert not has_remote_media(b'{"messages":[{"role":"user","content":"an \\"image\\" of type: \\"file\\""}]}')
    assert not has_remote_media(b'{"tools":[{"type":"function","function":{"parameters":{"type":"object"}}}]}')
