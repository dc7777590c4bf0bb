"""Test the counts of names that a prompt still has."""

from proxy.compaction.identifiers import Mention, SourceText, collect
from proxy.compaction.summary_message import MOST_NAMES, retention

TEXT = "src/app/main.py calls loadUserTable and save_user_table for order 4711223, raises ParseError and TS2304"


def test_names_are_counted_by_kind() -> None:
    names = collect([[SourceText("result", TEXT)]])
    prompt = ["- src/app/: main.py", "saveIt, ParseError, order 4711223, and loadUserTable"]
    assert retention([names], prompt, archived=True) == {
        "files": (1, 0, 0),
        "identifiers": (1, 1, 0),
        "numbers": (1, 0, 0),
        "errors": (1, 1, 0),
    }
    assert retention([names], [], archived=False) == {
        "files": (0, 0, 1),
        "identifiers": (0, 0, 2),
        "numbers": (0, 0, 1),
        "errors": (0, 0, 2),
    }


def test_the_likeliest_names_count_once() -> None:
    often = {f"often_{number}": Mention("name", 9, 9, 9, 9, 1) for number in range(MOST_NAMES - 1)}
    once = {f"once_{number}": Mention("name", 1, 1, 0, 0, 1) for number in range(50)}
    assert retention([once, often, dict(often)], list(often), archived=False) == {"identifiers": (MOST_NAMES - 1, 0, 1)}


def test_nothing_is_counted_without_names() -> None:
    assert retention([], ["any text"], archived=True) == {}
