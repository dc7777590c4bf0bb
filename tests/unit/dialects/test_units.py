"""Test reading the parts of a message's content."""

from proxy.dialects.parts import CHAT
from proxy.dialects.units import own_text


def test_a_label_names_at_most_four_kinds() -> None:
    parts = [{"type": f"kind{number}"} for number in range(6)]
    assert own_text(parts, CHAT)[1] == "[kind0, kind1, kind2, kind3, other parts: no longer shown]"
