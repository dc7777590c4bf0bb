"""Map the spellings of a path that clients use to the one path of each endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from starlette.types import Scope

from proxy.errors import ErrorShape
from proxy.http.request_body import header

PREFIX = "/v1"  # the API starts here

CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"

DEPLOYMENT = "compaction.deployment"  # key of a scope: the deployment that an Azure client names in the path

AZURE = "compaction.azure"
"""Key of a scope: present if the path was in Azure's form, so that `api-version` in the query belongs to Azure."""

_COMMON = frozenset({CHAT, MODELS, MESSAGES, RESPONSES, "/v1/embeddings", "/v1/messages/count_tokens"})

# First names of the paths of OpenAI's and Anthropic's APIs. Paths that begin otherwise are passed on as spelled.
_ROOTS = frozenset(
    {
        *("assistants", "audio", "batches", "chat", "completions", "containers", "conversations", "embeddings"),
        *("evals", "files", "fine_tuning", "images", "messages", "models", "moderations", "organization"),
        *("realtime", "responses", "threads", "uploads", "vector_stores", "videos"),
    }
)

# Endpoints that people paste as the base URL. The client then appends its own path.
_ENDPOINTS = (("chat", "completions"), ("completions",), ("embeddings",), ("responses",), ("messages",))
_APPENDED = (("v1",), ("models",), ("chat", "completions"), ("completions",), ("embeddings",), ("responses",))


def below(prefixes: Sequence[str], scope: Scope) -> Scope:
    """Return the scope with the path that follows one of the prefixes, or the scope itself.

    ``*`` in a prefix stands for one name of the path: ``/gateway/*`` serves ``/gateway/team-a/v1/models``.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    names = raw.split(b"?")[0].decode("latin-1").split("/")[1:]
    for prefix in prefixes:
        parts = prefix.strip("/").split("/")
        if len(names) > len(parts) and all(part in ("*", name) for part, name in zip(parts, names, strict=False)):
            rest = "/" + "/".join(names[len(parts) :])
            return {**scope, "path": unquote(rest), "raw_path": rest.encode("latin-1")}
    return scope


def canonical(scope: Scope) -> Scope:
    """Return the scope with the path of the endpoint that the client means, or the scope itself if nothing changes.

    These spellings change: a trailing or doubled slash, a missing or repeated `/v1`, an endpoint as the base URL
    (`/v1/chat/completions/models`), and Azure's `/openai/deployments/NAME/…` and `/openai/v1/…`. Names keep their
    percent-encoding. Case matters. Paths outside OpenAI's and Anthropic's APIs stay as they are.
    """
    path = scope["path"]
    if path in _COMMON:
        return scope
    raw: bytes = scope.get("raw_path") or path.encode()
    spelled = [name for name in raw.split(b"?")[0].decode("latin-1").split("/") if name]
    rest, deployment, azure = _meant(spelled)
    if not rest or unquote(rest[0]) not in _ROOTS:
        return scope
    meant = "/".join((PREFIX, *rest))
    changed: dict[str, object] = {"path": unquote(meant), "raw_path": meant.encode("latin-1")}
    if azure:
        changed[AZURE] = True
    if deployment is not None:
        changed[DEPLOYMENT] = deployment
    return {**scope, **changed}


def _meant(names: list[str]) -> tuple[list[str], str | None, bool]:
    """Return the names below /v1, the deployment if the path has one, and whether the path is in Azure's form."""
    deployment, azure, at = None, False, 0
    while at < len(names):
        if names[at] == "v1":
            at += 1
        elif names[at] == "openai":
            azure, at = True, at + 1
        elif names[at] == "deployments" and len(names) - at > 2 and unquote(names[at + 1]) not in (".", ".."):
            deployment, azure, at = unquote(names[at + 1]), True, at + 2
        elif size := _base(names, at):
            at += size
        else:
            break
    return names[at:], deployment, azure


def _base(names: list[str], at: int) -> int:
    """Return the number of names, from an index, of the endpoint that is a client's base URL; 0 if there is none."""
    for endpoint in _ENDPOINTS:
        end = at + len(endpoint)
        if tuple(names[at:end]) == endpoint:
            again = (*_APPENDED, endpoint)
            return len(endpoint) if any(tuple(names[end : end + len(start)]) == start for start in again) else 0
    return 0


def is_messages(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is in Anthropic's format: by its path, or by the header all its clients send."""
    path = scope["path"]
    if path == CHAT:
        return False
    return is_messages(path) or (path.startswith(PREFIX) and header(scope, b"anthropic-version") is not None)


def error_shape(scope: Scope) -> ErrorShape:
    """Return the shape in which the client of a request expects errors."""
    if is_anthropic(scope):
        return "anthropic"
    return "responses" if scope["path"].startswith(RESPONSES) else "openai"
