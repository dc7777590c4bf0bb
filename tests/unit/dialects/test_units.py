"""Test reading the parts of a message's content."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects.units import (
    is_media_part,
    is_text_part,
    labels_of,
    part_text,
    text_of,
    text_without_media,
    without_media,
)

TEXT = {"type": "text", "text": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
MIXED = {"role": "user", "content": [TEXT, IMAGE, IMAGE, {"type": "file", "file": {}}]}


def test_media_become_labels_in_the_visible_text() -> None:
    assert text_of(MIXED) == "hello\n[image]\n[image]\n[file]"
    assert text_of({"content": "plain"}) == "plain"


def test_text_and_labels_are_available_separately() -> None:
    assert text_without_media(MIXED) == "hello"
    assert labels_of(MIXED) == "[2 × image, file]"
    assert labels_of({"content": "plain"}) == ""


def test_a_label_names_at_most_four_kinds() -> None:
    parts = [{"type": f"kind{number}"} for number in range(6)]
    assert labels_of({"content": parts}) == "[kind0, kind1, kind2, kind3, other parts]"


def test_media_are_removed() -> None:
    assert without_media(MIXED) == {"role": "user", "content": [TEXT]}
    plain = {"role": "user", "content": "plain"}
    assert without_media(plain) is plain


def test_a_media_part_with_text_is_no_text_part() -> None:
    part = {**IMAGE, "text": "caption"}
    assert is_media_part(part)
    assert not is_text_part(part)


@pytest.mark.parametrize("part", [None, 5, [], {}, {"type": 5}, {"type": "text", "text": 5}])
def test_any_value_is_accepted_as_a_part(part: Any) -> None:
    assert not is_media_part(part)
    assert not is_text_part(part)
    assert isinstance(part_text(part), str)
    assert isinstance(text_of({"content": [part]}), str)
