"""The quick check for failed answers lets everything pass that the exact search finds."""

import pytest

from proxy.pipeline.billing import _FAILS, _may_fail

FAILURES = [
    b'{"error":{"message":"x"}}',
    b'{"id":1,"error" : {"code":5}}',
    b'data: {"error":"x"}',
    b"event: error\ndata: {}",
    b"event: upstream_error",
    b"event:InternalServerException\ndata: {}",
    b"event: throttlingexception",
    b"data: {}\nerror: no more tokens",
    b'data: {"type":"response.failed"}',
]


@pytest.mark.parametrize("change", [bytes, bytes.upper, bytes.title, bytes.swapcase])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_found_in_any_case(failure: bytes, change: type[bytes]) -> None:
    answer = b'data: {"choices":[]}\n' + change(failure)
    assert _FAILS.search(answer)
    assert _may_fail(answer)


def test_a_usual_answer_is_not_searched() -> None:
    assert not _may_fail(b'{"choices":[{"message":{"role":"assistant","content":"Yes."}}],"usage":{}}')
