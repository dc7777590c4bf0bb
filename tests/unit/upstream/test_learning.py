"""Tell errors about a missing path from those about a resource."""

import json

import pytest

from proxy.upstream.registry import REMEMBERED, MissingApis, denies_path

PATHS = [
    b"",
    b"404 page not found",  # Go: Ollama
    b"default backend - 404",
    {"detail": "Method Not Allowed"},
    {"error": {"message": "Invalid URL (POST /v1/messages)", "type": "invalid_request_error", "param": None}},
    {"message": "no Route matched with those values", "request_id": "b1c2"},  # Kong
    {"type": "https://tools.ietf.org/html/rfc9110#section-15.5.5", "title": "Not Found", "traceId": "00-ab-01"},
    {"error": {"code": "404", "message": "Resource not found"}},  # Azure
]
RESOURCES = [
    "Vector store with id 'vs_1' not found.",
    "Vector store with id '/v1/messages' not found.",
    "File not found: file_011",
    "Item with id 'rs_1' not found. Items are not persisted when `store` is set to false.",
    "Previous response with id 'resp_1' not found.",
    "Container not found",
    "No such prompt: pmpt_1",
    "The vector store was not found",
]


@pytest.mark.parametrize("body", PATHS, ids=str)
def test_an_error_about_the_path(body: object) -> None:
    assert denies_path(body if isinstance(body, bytes) else json.dumps(body).encode(), "gpt-4.1")


@pytest.mark.parametrize("text", RESOURCES)
@pytest.mark.parametrize("shape", ["openai", "anthropic", "plain"])
def test_an_error_about_a_resource(text: str, shape: str) -> None:
    body = {
        "openai": {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}},
        "anthropic": {"type": "error", "error": {"type": "not_found_error", "message": text}},
        "plain": {"detail": text},
    }[shape]
    assert not denies_path(json.dumps(body).encode(), "gpt-4.1")


@pytest.mark.parametrize(
    "error",
    [
        {"message": "Not found", "type": "invalid_request_error", "param": "tools[0].vector_store_ids"},
        {"message": "Not found", "code": "model_not_found"},
        {"message": "The API deployment for this resource does not exist.", "code": "DeploymentNotFound"},
        {"message": "The endpoint gpt-4.1 was not found"},
    ],
)
def test_an_error_whose_fields_name_the_resource(error: dict[str, object]) -> None:
    assert not denies_path(json.dumps({"error": error}).encode(), "gpt-4.1")


def test_a_conclusion_holds_for_its_caller_and_ends() -> None:
    now = [0.0]
    missing = MissingApis("main", lambda: now[0])
    missing.add("responses", "a")
    assert missing.lacks("responses", "a")
    assert not missing.lacks("messages", "a")
    assert not missing.lacks("responses", "b")
    now[0] = REMEMBERED
    assert not missing.lacks("responses", "a")


def test_nothing_contradicts_an_api_that_worked() -> None:
    now = [0.0]
    missing = MissingApis("main", lambda: now[0])
    missing.worked("responses")
    missing.add("responses", "a")
    assert not missing.lacks("responses", "a")
    now[0] = REMEMBERED
    missing.add("responses", "a")
    assert missing.lacks("responses", "a")


def test_a_forgotten_tenant_finds_the_api_again() -> None:
    missing = MissingApis("main")
    for caller in ("team:a m", "team:ab m"):
        missing.add("responses", caller)
    missing.forget(lambda tenant: tenant == "team:a")
    assert [missing.lacks("responses", caller) for caller in ("team:a m", "team:ab m")] == [False, True]
