"""Requests to compact, and their results, on OpenAI's API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.responses.native import ResponsesCompaction

API = ResponsesCompaction()
ASKED = {"role": "user", "content": "Hi"}
ITEM = {"type": "compaction", "id": "cmp_1", "encrypted_content": "xyz"}


def test_a_request_has_only_the_fields_that_the_path_takes() -> None:
    body = {"model": "m", "input": [ASKED], "instructions": "Be brief.", "tools": [], "prompt_cache_key": "k"}
    made = API.request(json.dumps(body).encode(), "Write notes.", 500)
    assert json.loads(made or b"") == {"model": "m", "input": [ASKED], "prompt_cache_key": "k"}


def test_a_client_that_delegates_itself_gets_no_compaction() -> None:
    assert API.accepts(b'{"input": []}')
    assert not API.accepts(b'{"input": [], "context_management": [{"type": "compaction"}]}')


def test_the_output_is_one_unit_with_its_bytes() -> None:
    made = API.read(b'{"output": [{"role":"user", "content":"Hi"} , {"type": "compaction"}]}')
    assert made == (b'[{"role":"user", "content":"Hi"},{"type": "compaction"}]', "")


@pytest.mark.parametrize("answer", [{"output": []}, {"output": [ITEM, ASKED]}, {"output": "x"}, {}, []])
def test_an_output_without_a_compaction_at_its_end_is_a_failure(answer: Any) -> None:
    assert API.read(json.dumps(answer).encode()) is None


def test_usage() -> None:
    end = API.read_usage(json.dumps({"usage": {"input_tokens": 9, "output_tokens": 2}}).encode())
    assert (end.prompt, end.output) == (9, 2)
