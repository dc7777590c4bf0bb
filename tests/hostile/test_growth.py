"""Every expression of the package takes linear time on texts made from the expression itself."""

import ast
import functools
import importlib
import pkgutil
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

import proxy

BOUNDED = {
    "proxy.compaction.stages.evict_results._TOKEN": "reads valid JSON, in which each string ends",
    "proxy.config.fields._INEXACT": "an operator's expression has 1,000 characters at most",
    "proxy.dialects.answers._END": "matched at a few places of an answer's end",
}
"""Expressions that only read short texts or the operator's, with the reason."""

SIZES = (8_000, 32_000)
"""Characters. A bounded repetition may take 4,000, so a shorter text may be a single match."""

MOST_GROWTH = 9
"""Four times the text takes 4 times as long in linear time, and 16 times in quadratic time."""

NEGLIGIBLE = 0.002
"""CPU seconds for the longer text that no growth is measured below."""

MOST_SECONDS = 0.2
"""CPU seconds for one text. An expression that takes exponential time takes more."""

LONG = 300
"""A repetition with a higher bound than this counts as one without a bound."""

REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)

METHODS = {"match", "fullmatch", "search", "finditer", "findall", "sub", "subn", "split"}


@functools.cache
def expressions() -> dict[str, re.Pattern[Any]]:
    """Return the compiled expressions in the package's modules and classes, by their places."""
    found: dict[int, tuple[str, re.Pattern[Any]]] = {}

    def visit(value: Any, place: str, depth: int = 0) -> None:
        if isinstance(value, re.Pattern):
            found.setdefault(id(value), (place, value))
        elif isinstance(value, dict) and depth < 4:
            visit(list(value.values()), place, depth + 1)
        elif isinstance(value, list | tuple | set | frozenset) and depth < 4:
            for number, one in enumerate(value):
                visit(one, f"{place}[{number}]", depth + 1)
        elif hasattr(type(value), "__dataclass_fields__") and depth < 4:
            for name in value.__dataclass_fields__:
                visit(getattr(value, name, None), f"{place}.{name}", depth + 1)
        elif isinstance(value, type) and value.__module__.startswith("proxy") and depth < 2:
            for name, one in list(vars(value).items()):
                visit(one, f"{place}.{name}", depth + 1)

    for module in pkgutil.walk_packages(proxy.__path__, "proxy."):
        if ".demo" not in module.name and not module.name.endswith("__main__"):
            for name, value in list(vars(importlib.import_module(module.name)).items()):
                visit(value, f"{module.name}.{name}")
    for module_name, nodes in modules():
        for node in nodes:
            match node:
                case ast.Call(ast.Attribute(ast.Name("re")), [ast.Constant(str() as pattern), *_]):
                    if ".demo" not in module_name:
                        found.setdefault(id(node), (f"{module_name}:{node.lineno}", re.compile(pattern)))
    return dict(sorted(found.values()))


@functools.cache
def modules() -> list[tuple[str, list[ast.AST]]]:
    """Return the names of the package's modules, and their calls of methods that expressions also have."""

    def uses_method(node: ast.AST) -> bool:
        method = node.func if isinstance(node, ast.Call) else node
        return isinstance(method, ast.Attribute) and method.attr in METHODS

    root = Path(proxy.__file__).parent
    return [
        (
            ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"),
            [*filter(uses_method, ast.walk(ast.parse(path.read_bytes())))],
        )
        for path in root.rglob("*.py")
    ]


def owner(module: str, of: ast.expr) -> str:
    """Return a name for the value on which a method is called. Private names belong to a module, others to a folder."""
    if isinstance(of, ast.Name):
        return f"{module}.{of.id}" if of.id.startswith("_") else of.id
    return f"{'.'.join(module.split('.')[:2])}:{of.attr}" if isinstance(of, ast.Attribute) else ""


@functools.cache
def uses() -> dict[str, set[str]]:
    """Return the methods with which the package uses expressions. One that gets a place may begin anywhere."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, nodes in modules():
        placed = {
            node.func
            for node in nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("match", "fullmatch")
            and len(node.args) > 1
        }
        for node in nodes:
            if isinstance(node, ast.Attribute):
                alone = node.attr in ("match", "fullmatch") and node not in placed
                found[owner(module, node.value)].add(node.attr if alone else "search")
    return found


def methods(place: str) -> set[str]:
    """Return how the package uses an expression. One that it passes on may be used in any way."""
    module, _, name = re.sub(r"(\[\d+\])+$", "", place).rpartition(".")
    keys = (place, name) if name.isupper() or name.startswith("_") else ()
    keys = (*keys, f"{'.'.join(module.split('.')[:2])}:{name}")
    return set().union(*(uses().get(key, ()) for key in keys)) or {"search", "fullmatch"}


def tree(expression: re.Pattern[Any]) -> tuple[Any, int]:
    """Return the parts of an expression, and its flags. One of bytes is read as one of ASCII text."""
    source = expression.pattern
    if isinstance(source, str):
        return parser.parse(source, expression.flags & ~re.U), expression.flags
    return parser.parse(source.decode("latin-1"), expression.flags | re.A), expression.flags | re.A


def example(parts: Any, pick: int, wide: str = "a") -> str:
    """Return a text that parts of an expression match, more or less.

    ``pick`` selects among alternatives, and ``wide`` is the character for sets that accept nearly all.
    """
    text = ""
    for op, value in parts:
        if op is codes.LITERAL:
            text += chr(value)
        elif op is codes.IN:
            choices = list(_characters(value, wide))
            text += choices[pick % len(choices)]
        elif op in (codes.ANY, codes.NOT_LITERAL):
            text += wide if value != ord(wide) else "a"
        elif op in REPEATS:
            text += example(value[2], pick, wide) * max(min(value[0], 3), 1 - pick % 2)
        elif op is codes.SUBPATTERN:
            text += example(value[3], pick, wide)
        elif op is codes.ATOMIC_GROUP:
            text += example(value, pick, wide)
        elif op is codes.ASSERT and value[0] < 0:
            text += example(value[1], pick, wide)
        elif op is codes.BRANCH:
            text += example(value[1][pick % len(value[1])], pick, wide)
    return text


def _characters(inside: Any, wide: str) -> Iterator[str]:
    """Yield a character for each part of a set."""
    if inside and inside[0][0] is codes.NEGATE:
        yield wide if (codes.LITERAL, ord(wide)) not in inside else "a"
        yield from "1 -"
    for op, value in inside:
        if op is codes.LITERAL:
            yield chr(value)
        elif op is codes.RANGE:
            yield chr(value[0])
        elif op is codes.CATEGORY:
            yield {"DIGIT": "1", "SPACE": " ", "WORD": "a"}.get(str(value).removeprefix("CATEGORY_"), "-")


def _inner(op: Any, value: Any) -> list[Any]:
    """Return the expressions inside a part of an expression."""
    if op in REPEATS:
        return [value[2]]
    if op in (codes.SUBPATTERN, codes.ASSERT, codes.ASSERT_NOT):
        return [value[-1]]
    if op is codes.BRANCH:
        return list(value[1])
    if op is codes.GROUPREF_EXISTS:
        return [one for one in value[1:] if one]
    return [value] if op is codes.ATOMIC_GROUP else []


def _repeated(parts: Any, wide: str, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield texts for each repetition that has no bound, after a text for the parts before it."""
    for op, value in parts:
        if op in REPEATS and value[1] > LONG:
            yield from ((before, example(value[2], pick, wide)) for pick in range(3))
        for one in _inner(op, value):
            yield from _repeated(one, wide, before)
        before += example([(op, value)], 0)


def texts(expression: re.Pattern[Any]) -> list[tuple[str, str, str]]:
    """Return beginnings, texts to repeat, and ends that nearly match.

    The first character of a match, repeated where any character fits, lets a match begin at each place.
    """
    parts, _ = tree(expression)
    found = {("", example(parts, pick), "") for pick in range(3)}
    for wide in {"a", example(parts, 0)[:1] or "a"}:
        for before, again in _repeated(parts, wide):
            found |= {(before, again, end) for end in ("", "\x00")}
            found |= {("", before + again, ""), ("", before, "\x00")}
    return sorted(text for text in found if text[1])


def sized(text: tuple[str, str, str], size: int) -> str:
    """Return a text of about a size."""
    return text[0] + text[1] * max(1, size // len(text[1])) + text[2]


def seconds(expression: re.Pattern[Any], method: str, text: str) -> float:
    """Return the CPU seconds that a method takes, ``MOST_SECONDS`` at most."""
    given: Any = text.encode("latin-1") if isinstance(expression.pattern, bytes) else text
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    begun = time.thread_time()
    try:
        try:
            if method == "search":
                for _ in expression.finditer(given):
                    pass
            else:
                getattr(expression, method)(given)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # the time may be over just now
    except TimeoutError:
        return MOST_SECONDS
    return time.thread_time() - begun


def grows(expression: re.Pattern[Any], method: str, text: tuple[str, str, str], tries: int) -> bool:
    """Return whether a longer text takes more than linear time in each try."""
    short, long = (sized(text, size) for size in SIZES)
    for _ in range(tries):
        took = seconds(expression, method, long)
        if took < NEGLIGIBLE or took < min(MOST_SECONDS, MOST_GROWTH * seconds(expression, method, short)):
            return False
    return True


def slow(
    expression: re.Pattern[Any], how: set[str], tries: int = 3, every: int = 1
) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield the methods and texts with which an expression takes more than linear time. Try one in ``every`` text."""
    for method in how:
        yield from ((method, text) for text in texts(expression)[::every] if grows(expression, method, text, tries))


@pytest.fixture(autouse=True)
def interrupted() -> Iterator[None]:
    """Raise ``TimeoutError`` in an expression when its time is over."""

    def over(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, over)
    yield
    signal.signal(signal.SIGVTALRM, before)


PARTS = 2


@pytest.mark.parametrize("part", range(PARTS))
def test_each_expression_takes_linear_time(part: int, full: bool) -> None:
    """To find the expressions takes seconds, so no process does it before it runs a part."""
    places, every = list(expressions())[part::PARTS], 1 if full else 2
    slow_ones = {place: next(slow(expressions()[place], methods(place), every=every), None) for place in places}
    found = {place: how for place, how in slow_ones.items() if how}
    assert found.keys() == BOUNDED.keys() & {*places}, found


def test_each_exception_is_an_expression() -> None:
    assert BOUNDED.keys() - expressions().keys() == set()


PLANTED = [
    r"\s+$",
    r'"(?:[^"\\]|\\.)*"',
    r"name=\r\n(?:[^\r\n]+\r\n)*\r\n",
    r"\S*/\S*",
    r"\w+\d",
    r"a.*b",
    r"<(\w+)>[^<]*>x(?=.*end)",
    r"(?<=\d)\d*,",
    r"\d++(?:,\d{3})*+ of",
    r"(?:a+)+b",
    r"[+](?>\w+)!|\w+@",
]


@pytest.mark.parametrize("pattern", PLANTED)
def test_a_slow_expression_is_found(pattern: str) -> None:
    assert any(slow(re.compile(pattern), {"search"}, tries=1))


@pytest.mark.parametrize("pattern", [r"gpt-\d+.*-mini.*", r"\s*x\s*\Z\s*y|a*a*b", r"(?=A.*\nB.*\nC)", r"(?:a|aa)*b"])
def test_an_expression_that_is_slow_from_one_place_is_found(pattern: str) -> None:
    assert any(slow(re.compile(pattern, re.DOTALL), {"match"}, tries=1))
