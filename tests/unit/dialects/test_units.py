"""Test reading the parts of a message's content."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects.parts import CHAT
from proxy.dialects.units import content_text, is_text_part, own_text
from proxy.dialects.walk import is_media, is_text, part_text

TEXT = {"type": "text", "text": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
MIXED = {"role": "user", "content": [TEXT, IMAGE, IMAGE, {"type": "file", "file": {}}]}


def test_media_become_labels_in_the_visible_text() -> None:
    assert content_text(MIXED["content"], CHAT) == "hello\n[image]\n[image]\n[file]"
    assert content_text("plain", CHAT) == "plain"


def test_a_label_names_at_most_four_kinds() -> None:
    parts = [{"type": f"kind{number}"} for number in range(6)]
    assert own_text(parts, CHAT)[1] == "[kind0, kind1, kind2, kind3, other parts: no longer shown]"


def test_a_media_part_with_text_is_no_text_part() -> None:
    part = {**IMAGE, "text": "caption"}
    assert is_media(part, CHAT)
    assert not is_text(part, CHAT)
    assert not is_text_part(part)


@pytest.mark.parametrize("part", [None, 5, [], {}, {"type": 5}, {"type": "text", "text": 5}])
def test_any_value_is_accepted_as_a_part(part: Any) -> None:
    assert not is_media(part, CHAT)
    assert not is_text(part, CHAT)
    assert not is_text_part(part)
    assert isinstance(part_text(part, CHAT), str)
    assert isinstance(content_text([part], CHAT), str)
