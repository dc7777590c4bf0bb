"""Spellings of a path, and the endpoint and the Azure deployment that they mean."""

from typing import Any
from urllib.parse import unquote

import pytest

from proxy.endpoints import paths
from proxy.endpoints.paths import DEPLOYMENT, canonical

CHAT = "/v1/chat/completions"


def meant(path: str) -> tuple[str, str | None]:
    scope = canonical({"path": unquote(path), "raw_path": path.encode()})
    return scope["raw_path"].decode(), scope.get(DEPLOYMENT)


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [
        (CHAT, CHAT),
        ("//v1/chat/completions", CHAT),
        ("/v1/chat/completions/chat/completions", CHAT),
        ("/openai/v1/chat/completions", CHAT),
        ("/v1/v1/messages", "/v1/messages"),
        ("/messages", "/v1/messages"),
        ("/v1/responses/compact", "/v1/responses/compact"),
        # Case matters, and paths outside the APIs stay as spelled.
        ("/v1/Chat/Completions/", "/v1/Chat/Completions/"),
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
