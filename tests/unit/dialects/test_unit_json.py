"""Results are made once for the same bytes, and a full cache is emptied."""

from __future__ import annotations

from proxy.dialects.units import ByDigest


def test_each_value_is_computed_once() -> None:
    computed: list[bytes] = []
    lengths = ByDigest(lambda raw: computed.append(raw) or len(raw))  # type: ignore[func-returns-value]
    assert lengths.of([b"a", memoryview(b"bcd")[1:], b"a", b""]) == [1, 2, 1, 0]
    assert lengths.of(iter([b"cd", b""])) == [2, 0]
    assert computed == [b"a", b"cd", b""]


def test_a_full_cache_is_emptied() -> None:
    computed: list[bytes] = []
    lengths = ByDigest(lambda raw: computed.append(raw) or len(raw), most=2)  # type: ignore[func-returns-value]
    assert lengths.of([b"a", b"b", b"c", b"a", b"c"]) == [1] * 5
    assert computed == [b"a", b"b", b"c", b"a"]
