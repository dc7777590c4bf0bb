"""The framing of server-sent events, however the bytes arrive."""

import pytest

from proxy.http.sse import LONGEST_EVENT, EventBuffer


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("step", [1, 3, 100])
def test_only_whole_events_are_forwarded(end: bytes, step: int) -> None:
    stream, buffer, sent = b"data: one" + end + b"data: two" + end + b"data: thr", EventBuffer(), b""
    for start in range(0, len(stream), step):
        sent += buffer.feed(stream[start : start + step])
        assert sent in (b"", b"data: one" + end, b"data: one" + end + b"data: two" + end)
    assert (sent + buffer.rest(), buffer.rest(), buffer.midway) == (stream, b"data: thr", False)


@pytest.mark.parametrize("step", [LONGEST_EVENT // 2, LONGEST_EVENT + 10])
def test_an_event_that_is_too_long_is_forwarded_as_it_arrives(step: int) -> None:
    stream, buffer = b"data: " + b"x" * (LONGEST_EVENT + 4), EventBuffer()
    sent = b"".join(buffer.feed(stream[start : start + step]) for start in range(0, len(stream), step))
    assert buffer.midway
    assert buffer.feed(b"\n\n").endswith(b"\n\n")
    assert sent
    assert not buffer.midway
