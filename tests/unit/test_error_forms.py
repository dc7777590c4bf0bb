"""Errors of each provider's form have a readable text."""

import pytest

from proxy.upstream.bridge.transport import _error_fields


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'[{"error": {"code": 400, "message": "Too long", "status": "INVALID_ARGUMENT"}}]', "Too long"),
        (b'{"Message": "Too long"}', "Too long"),
        (b'{"detail": "Too long"}', "Too long"),
        (b'{"error": "Too long"}', "Too long"),
        (b'{"error": {"message": "Too long"}}', "Too long"),
        (b"Too long\n", "Too long"),
    ],
)
def test_text(raw: bytes, text: str) -> None:
    assert _error_fields(raw)["message"] == text
