"""Spellings of a path, and the endpoint and the Azure deployment that they mean."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import pytest

from proxy.endpoints import paths
from proxy.endpoints.paths import AZURE, DEPLOYMENT, canonical

CHAT = "/v1/chat/completions"


def meant(path: str) -> tuple[str, str | None]:
    scope = canonical({"path": unquote(path), "raw_path": path.encode()})
    return scope["raw_path"].decode(), scope.get(DEPLOYMENT)


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [
        (CHAT, CHAT),
        ("/v1/chat/completions/", CHAT),
        ("/v1//chat//completions", CHAT),
        ("//v1/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/chat/completions", CHAT),
        ("/v1/chat/completions/chat/completions", CHAT),
        ("/v1/chat/completions/v1/chat/completions/", CHAT),
        ("/v1/completions/chat/completions", CHAT),
        ("/v1/chat/completions/models", "/v1/models"),
        ("/v1/messages/models", "/v1/models"),
        ("/openai/v1/chat/completions", CHAT),
        ("/v1/openai/chat/completions", CHAT),
        ("/openai/models", "/v1/models"),
        ("/openai/v1/responses/resp_1", "/v1/responses/resp_1"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/messages/v1/messages", "/v1/messages"),
        ("/v1/messages/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/messages", "/v1/messages"),
        ("/models/", "/v1/models"),
        ("/v1/models/org//name%2Fpart/", "/v1/models/org/name%2Fpart"),
        # Paths of the APIs themselves stay.
        ("/v1/chat/completions/chatcmpl-1/messages", "/v1/chat/completions/chatcmpl-1/messages"),
        ("/v1/messages/batches/1/results", "/v1/messages/batches/1/results"),
        ("/v1/responses/compact", "/v1/responses/compact"),
        ("/v1/models/v1/models", "/v1/models/v1/models"),
        ("/v1/files/a%2Fb%20c/%E2%82%AC;v=1,2", "/v1/files/a%2Fb%20c/%E2%82%AC;v=1,2"),
        # Case matters, and paths outside the APIs stay as spelled.
        ("/v1/Chat/Completions/", "/v1/Chat/Completions/"),
        ("/V1/models", "/V1/models"),
        ("/v1//double//slashes/", "/v1//double//slashes/"),
        ("/livez/", "/livez/"),
        ("/v1", "/v1"),
        ("/", "/"),
    ],
)
def test_a_spelling_means_an_endpoint(path: str, endpoint: str) -> None:
    assert meant(path) == (endpoint, None)


@pytest.mark.parametrize(
    ("path", "endpoint", "deployment"),
    [
        ("/openai/deployments/gpt-4o/chat/completions", CHAT, "gpt-4o"),
        ("/v1/deployments/gpt-4o/chat/completions", CHAT, "gpt-4o"),
        ("/v1/openai/deployments/gpt-4o/chat/completions/", CHAT, "gpt-4o"),
        ("/openai/deployments/my%20own/embeddings", "/v1/embeddings", "my own"),
        ("/openai/deployments/gpt-4o/chat/completions/models", "/v1/models", "gpt-4o"),
    ],
)
def test_azure_clients_name_the_deployment_in_the_path(path: str, endpoint: str, deployment: str) -> None:
    assert meant(path) == (endpoint, deployment)


def test_the_usual_path_costs_nothing() -> None:
    scope = {"path": CHAT, "raw_path": CHAT.encode()}
    assert canonical(scope) is scope
    assert AZURE not in scope


@pytest.mark.parametrize("name", ["v1", "openai", "deployments/a", "chat/completions", "embeddings", "completions"])
def test_each_name_of_a_path_is_read_once(name: str) -> None:
    """A path of 64 KB has up to 20,000 names. Each copy of a list of the rest is one access by a slice."""

    class Names(list[str]):
        read = 0

        def __getitem__(self, place: Any) -> Any:
            found = super().__getitem__(place)
            Names.read += len(found) if isinstance(place, slice) else 1
            return found

    names = Names([*name.split("/") * 1_000, "models"])
    assert paths._meant(names)[0] == ["models"]
    assert Names.read < 30 * len(names)
