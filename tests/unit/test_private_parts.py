"""One module for each dependency may use its private parts, because an update may change them."""

import ast
import asyncio
import importlib
import inspect
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

from proxy import litellm_package
from proxy.tokens import text

ROOT = Path(__file__).parents[2]

ALLOWED = {
    "proxy.litellm_package": {"litellm"},
    "proxy.server.http_protocol": {"uvicorn"},
    "proxy.tokens.text": {"tiktoken"},
    "proxy.upstream.connections": {"aiohttp"},
}
"""The modules that use private parts of a dependency, one for each dependency."""

DOCUMENTED = {
    *("cryptography.exceptions", "cryptography.hazmat.primitives.ciphers.aead"),
    *("msgspec.structs", "msgspec.toml"),
    *("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk.resources"),
    *("opentelemetry.sdk.trace", "opentelemetry.sdk.trace.export", "opentelemetry.sdk.trace.sampling"),
    *("opentelemetry.sdk.util.instrumentation", "opentelemetry.trace"),
    "opentelemetry.trace.propagation.tracecontext",
    *("prometheus_client.core", "prometheus_client.multiprocess", "prometheus_client.registry"),
    *("redis.asyncio", "redis.asyncio.connection", "redis.asyncio.retry", "redis.backoff", "redis.exceptions"),
    *("rich.console", "rich.table", "rich.text"),
    *("starlette.applications", "starlette.middleware.cors", "starlette.requests", "starlette.responses"),
    *("starlette.routing", "starlette.types"),
    *("structlog.stdlib", "structlog.typing"),
    "yaml.events",
}
"""Modules that the documents of a dependency name. A dependency's own name is public."""

SUFFIXES = {
    *("_call", "_delta", "_output"),  # of the APIs' types
    *("_file", "_id", "_path", "_url"),  # of arguments of tools
    *("_expires_seconds", "_proxy", "_total"),
}
"""Texts of the proxy and of the APIs that look like private names."""

_PRIVATE = re.compile(r"_[a-z]\w*")


_PYTHONS = {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}
"""Names that Python's own classes have."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "proxy").rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py") and "demo" not in path.parts:
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


def foreign(module: str) -> bool:
    return module.partition(".")[0] not in (*sys.stdlib_module_names, "proxy", "builtins")


def own_names() -> set[str]:
    """Return the private names that the proxy defines."""
    found: set[str] = set()
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return found


def names_in(code: CodeType) -> set[str]:
    inner = (names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def private_names(kind: type) -> set[str]:
    """Return the private names that the functions of a class use or define."""
    functions = [one for one in vars(kind).values() if inspect.isfunction(one) and one.__module__ == kind.__module__]
    used = set(vars(kind)).union(*(names_in(one.__code__) for one in functions))
    return {name for name in used - _PYTHONS if _PRIVATE.fullmatch(name)}


def inherited(module: str) -> Iterator[str]:
    """Yield the dependencies whose private parts a class of a module takes from its bases."""
    for kind in vars(importlib.import_module(module)).values():
        if not inspect.isclass(kind) or kind.__module__ != module:
            continue
        for base in kind.__mro__[1:]:
            if foreign(base.__module__) and private_names(kind) & private_names(base):
                yield base.__module__.partition(".")[0]


LITELLMS = {
    *("_async_failure_callback", "_async_input_callback", "_async_success_callback"),
    *("_get_async_http_client", "_get_sync_http_client", "_hidden_params", "_skip_mcp_handler"),
}
OWNERS = {"_core_bpe": "tiktoken", "submodule_search_locations": "litellm", **dict.fromkeys(LITELLMS, "litellm")}
"""The dependencies of private attributes, by name. The second one leads to the files of a package."""


def accessed(source: str, known: set[str]) -> Iterator[str]:
    """Yield the owners of attributes of other objects that are private, and that the proxy doesn't define."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or ast.unparse(node.value) == "self":
            continue
        if node.attr in OWNERS or (_PRIVATE.fullmatch(node.attr) and node.attr not in known):
            yield OWNERS.get(node.attr, ast.unparse(node))


def undocumented(source: str) -> Iterator[str]:
    """Yield the dependencies of imported modules that their documents don't name."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
        for name in names:
            if "." in name and foreign(name) and name not in DOCUMENTED:
                yield name.partition(".")[0]


def named(source: str, known: set[str]) -> Iterator[str]:
    """Yield private names in strings, as `getattr` takes them."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if _PRIVATE.fullmatch(node.value) and node.value not in known | SUFFIXES:
            yield OWNERS.get(node.value, node.value)


@pytest.mark.long
def test_them() -> None:
    known = own_names()
    found = {}
    for name, path in modules():
        source = path.read_text()
        parts = {*inherited(name), *accessed(source, known), *undocumented(source), *named(source, known)}
        if parts:
            found[name] = parts
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("code", "owner"),
    [
        ("from uvicorn.supervisors import Multiprocess", "uvicorn"),
        ("import aiohttp.client_proto", "aiohttp"),
        ("module = importlib.import_module('litellm.llms.openai.common_utils')", "litellm"),
        ("Path(find_spec('litellm').submodule_search_locations[0])", "litellm"),
        ("getattr(response, '_hidden_params')", "litellm"),
        ("call['_skip_mcp_handler'] = True", "litellm"),
        ("other._core_bpe.encode(text)", "tiktoken"),
        ("session._new_part", "session._new_part"),
        ("setattr(session, '_new_part', None)", "_new_part"),
        ("from starlette.routing import Route", None),
        ("import litellm", None),
        ("self._own; name.endswith('_url')", None),
    ],
)
def test_each_way_to_use_them_is_found(code: str, owner: str | None) -> None:
    assert {*accessed(code, set()), *undocumented(code), *named(code, set())} == ({owner} if owner else set())


def test_their_dependencies_have_an_upper_bound() -> None:
    """An update may change private parts. The test of each module then says which part has changed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [one for several in project["optional-dependencies"].values() for one in several]
    bounded = {re.split(r"[\[<>=!~]", one)[0] for one in (*project["dependencies"], *extras) if "<" in one}
    assert bounded >= {"aiohttp", "litellm", "opentelemetry-sdk", "tiktoken", "uvicorn"}


_HANDLERS = "litellm.llms.custom_httpx.http_handler"
_OPENAI = "litellm.llms.openai.common_utils:BaseOpenAILLM"
_PROTOCOL = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"
_POOL = "uvicorn.supervisors:Multiprocess"


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "arguments"),
    [
        (f"{_HANDLERS}:AsyncHTTPHandler.__init__", ("self", "follow_redirects")),
        (f"{_HANDLERS}:HTTPHandler.__init__", ("self", "follow_redirects")),
        (f"{_OPENAI}._get_async_http_client", ()),
        (f"{_OPENAI}._get_sync_http_client", ()),
        (f"{_PROTOCOL}.connection_made", ("self", "transport")),
        (f"{_PROTOCOL}.connection_lost", ("self", "exc")),
        (f"{_PROTOCOL}._start_asgi_task", ("self", "cycle", "app")),
        (f"{_PROTOCOL}.on_headers_complete", ("self",)),
        (f"{_PROTOCOL}.on_body", ("self", "body")),
        (f"{_PROTOCOL}.on_message_complete", ("self",)),
        (f"{_PROTOCOL}.on_response_complete", ("self",)),
        (f"{_PROTOCOL}.shutdown", ("self",)),
        (f"{_POOL}.__init__", ("self", "config", "sockets")),
        (f"{_POOL}.keep_subprocess_alive", ("self",)),
        (f"{_POOL}.handle_hup", ("self",)),
        ("uvicorn.supervisors.multiprocess:Process.is_ready", ("self", "timeout")),
    ],
)
def test_the_installed_version_has_them(part: str, arguments: tuple[str, ...]) -> None:
    taken = inspect.signature(pkgutil.resolve_name(part)).parameters
    assert [name for name in arguments if name not in taken] == []


@pytest.mark.long
def test_the_installed_litellm_has_the_flags_and_the_files() -> None:
    litellm = asyncio.run(litellm_package.load())
    names = vars(sys.modules["litellm"])
    assert [name for name in litellm_package._FLAGS if name not in names] == []
    assert [name for name in litellm_package._CALLBACK_LISTS if name not in names] == []
    assert [name for name in litellm_package._ANSWER_TYPES if not hasattr(litellm.types.utils, name)] == []
    assert litellm_package.table() is not None
    assert (folder := litellm_package.tokenizers()) is not None
    assert folder.is_dir()
    assert {"anthropic", "bedrock", "gemini"} <= litellm_package.providers()


def test_the_installed_tiktoken_counts_as_its_public_method() -> None:
    encoding = text.encoding("o200k_base")
    words = "one token for each word " * 100
    assert text.count(encoding, words) == len(encoding.encode(words))
