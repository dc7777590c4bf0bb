"""Test reading the parts of a message's content."""

from proxy.dialects.parts import CHAT, Part
from proxy.dialects.units import own_text


def test_a_label_names_at_most_four_kinds() -> None:
    parts = [{"type": f"kind{number}"} for number in range(6)]
    assert own_text(parts, CHAT)[1] == "[kind0, kind1, kind2, kind3, other parts: no longer shown]"


def test_the_users_words_may_stand_in_any_field_that_a_row_names() -> None:
    table = {**CHAT, "transcript": Part(plays="said", reads=("speech.words",), cuts=("speech.words",))}
    said = {"type": "transcript", "speech": {"words": "Stop the pump."}}
    assert own_text([{"type": "text", "text": "Listen:"}, said], table) == ("Listen:\nStop the pump.", "")
    assert own_text([said], CHAT) == ("", "[transcript: no longer shown]")
