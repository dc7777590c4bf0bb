"""The beginning of a compressed answer, however its bytes arrive."""

import gzip
import random
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from proxy.errors import BodyTooLarge
from proxy.http.decompression import Unpacking, unpack

MB = 1_000_000
TEXT = b"".join(b"%d, " % number for number in range(5_000)) + random.Random(1).randbytes(1_000)
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    " GZIP ": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
}


@pytest.mark.long
@pytest.mark.parametrize("encoding", PACKERS)
@pytest.mark.parametrize("step", [1, 7, 1_000, MB])
def test_all_that_has_come_is_unpacked(encoding: str, step: int) -> None:
    packed = PACKERS[encoding](TEXT)
    unpacking = Unpacking(encoding, MB)
    for start in range(0, len(packed), step):
        unpacking.feed(packed[start : start + step])
        assert TEXT.startswith(unpacking.beginning)
    assert unpacking.beginning == TEXT
    assert not unpacking.ended


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_what_is_broken_or_unknown_is_not_unpacked(encoding: str) -> None:
    broken = Unpacking(encoding, MB)
    broken.feed(b'{"error": {"message": "no"}}' * 10)
    assert broken.ended
    assert not broken.beginning
    broken.feed(PACKERS[encoding](TEXT))
    assert not broken.beginning
    unknown = Unpacking("snappy", MB)
    unknown.feed(TEXT)
    assert unknown.ended


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": lambda data: brotli.compress(data, quality=4),
    "zstd": zstandard.compress,
    "gzip, zstd": lambda data: zstandard.compress(gzip.compress(data)),
}


@pytest.mark.long
@pytest.mark.parametrize("size", [900_000, 1_600_000, 8_000_000, 15_990_000])
@pytest.mark.parametrize("encoding", PACKED)
def test_a_conversation_may_repeat_itself(encoding: str, size: int) -> None:
    line = b'{"role": "tool", "tool_call_id": "call_1", "content": "the same log line again and again"}, '
    body = line * (size // len(line))
    packed = PACKED[encoding](body)
    assert len(packed) * 25 < len(body)
    assert unpack(packed, encoding, 64_000_000) == body
    with pytest.raises(BodyTooLarge):
        unpack(packed, encoding, size // 2)


@pytest.mark.long
@pytest.mark.parametrize("encoding", PACKED)
def test_a_body_of_many_megabytes_may_not_become_many_times_its_size(encoding: str) -> None:
    with pytest.raises(BodyTooLarge, match="25 times"):
        unpack(PACKED[encoding](bytes(20_000_000)), encoding, 64_000_000)
