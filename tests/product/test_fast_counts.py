"""With fastokens, the proxy reports the same tokens as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.tokens import text
from tests.kit import fast_counts
from tests.kit.front_door import front, talk

ODD = [
    "<|endoftext|> is plain text here, and so is <|im_start|>.",
    "naïve 中文 ไทย العربية 👩\u200d💻 \U000e0fff \u0378 1234567 \u00a0\u3000\n\n\t x",
    " " * 3_000 + "a" * 3_000 + "\r\n" * 500,
    "isn'ſ it? \ud83d",
]


def conversation(seed: str) -> list[Any]:
    return [*talk(20, 1_000, seed), *({"role": "user", "content": f"{seed} {odd}"} for odd in ODD)]


@fast_counts.needs_fastokens
def test_counts_are_the_same_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    fast_count = text._fast_count

    def watched(name: str, value: str) -> int | None:
        found = fast_count(name, value)
        used.append(found or 0)
        return found

    monkeypatch.setattr(text, "_fast_count", watched)
    seeds = ("first", "second", "third")

    def reported(folder: Path, *, waits: bool) -> list[str]:
        folder.mkdir()
        with front({"default": {}}, folder, 64_000) as proxy:
            found = []
            for seed in seeds:
                found.append(proxy.ask(conversation(seed)).headers["x-compaction-tokens-before"])
                if waits:
                    fast_counts.loaded()
            return found

    with_it = reported(tmp_path / "with", waits=True)
    assert sum(used) > 20_000
    used.clear()
    monkeypatch.setattr(text, "find_spec", lambda name: None)
    assert reported(tmp_path / "without", waits=False) == with_it
    assert used == []
