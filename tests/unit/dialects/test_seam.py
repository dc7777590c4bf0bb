"""Only dialects know the JSON of conversations."""

import ast
from pathlib import Path

import pytest

PROXY = Path(__file__).parents[3] / "proxy"

KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "function_call", "refusal"})
"""Keys of chat messages."""

ELSEWHERE = {
    "limits/learned.py": "'refusal' is the source of a limit",
    "pipeline/summary_models.py": "'refusal' is the source of a limit",
    "upstream/litellm/transport.py": "completes LiteLLM's answers",
    "upstream/litellm/request.py": "checks requests for LiteLLM",
    "overflow/patterns.py": "names a field in error texts",
    "overflow/errors.py": "tells an answer from an error",
    "library.py": "answers summary calls with the caller's function",
    "endpoints/restrictions.py": "finds tools that a conversation defines",
    "upstream/limit_discovery.py": "'role' is a field of llama-server",
    "upstream/bridge/returned.py": "restores ids and data of servers in translated requests",
    "upstream/refusals.py": "reads refusals of translated requests",
    "upstream/traits.py": "edits translated requests that an upstream refused",
    "upstream/bridge/chat.py": "checks LiteLLM's translations",
    "upstream/bridge/completions.py": "reads chat completions, and puts their calls in order",
    "upstream/bridge/messages.py": "translates requests of /v1/messages, and builds their answers",
    "upstream/bridge/over_responses.py": "translates chat completions to responses",
    "upstream/bridge/responses.py": "writes chat requests for items",
    "upstream/bridge/transport.py": "names the part of a request that has another form",
    "upstream/bridge/responses_answers.py": "builds responses from chat streams",
    "summary/model.py": "measures requests of its own",
    "summary/forms.py": "sends requests of its own",
    "summary/prompt.py": "writes chat requests of its own",
    "summary/quality.py": "reads the answers to them",
    "store/sealing.py": "'content' is a label for encryption",
}
"""Modules that use such a word, by path, with the reason."""


def modules() -> list[str]:
    found = (path.relative_to(PROXY).as_posix() for path in PROXY.rglob("*.py"))
    return sorted(path for path in found if not path.startswith(("dialects/", "demo/")))


def keys_in(path: str) -> set[str]:
    tree = ast.parse((PROXY / path).read_text(encoding="utf-8"))
    values = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return values & KEYS


@pytest.mark.long
def test_keys_of_messages_appear_in_dialects_and_in_each_exception_only() -> None:
    assert {path for path in modules() if keys_in(path)} == {*ELSEWHERE}
