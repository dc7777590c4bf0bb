"""The tree of a file's values, with their lines and original text: parse YAML, and replace environment variables.

Errors name their line, and have no secrets.

The parser is stricter than YAML, because these features cause mistakes in production. It rejects tags, duplicate keys,
merge keys, and second documents. It limits size, depth, and number of nodes, and counts aliases in expanded form.

Variables are ``${NAME}`` and ``${NAME:-default}``. They replace text only: a variable's value can't add a key or change
the structure. ``$${`` is a literal ``${``. As in a shell, ``:-`` also applies when the variable is set but empty.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    NodeEvent,
    ScalarEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

MOST = 100


class Issue(NamedTuple):
    """One error. ``line`` counts from 1. ``message`` is ``setting: problem. Fix: what to write``, without secrets."""

    line: int
    message: str


class Issues(Exception):
    """The distinct errors of one pass over the file, at most ``MOST``."""

    def __init__(self, found: Iterable[Issue]) -> None:
        distinct = list(dict.fromkeys(found))
        super().__init__(f"{len(distinct)} errors in the configuration")
        self.issues = distinct[:MOST]
        if len(distinct) > MOST:
            more = f"{len(distinct) - MOST:,} more errors"
            self.issues.append(issue(distinct[MOST].line, more, "check that this is the right file"))


def issue(line: int, problem: str, fix: str, where: str = "") -> Issue:
    """Return an error at a line. ``where`` is the setting's path, ``fix`` the text to write in the file."""
    return Issue(line, error_text(problem, fix, where))


def error_text(problem: str, fix: str, where: str = "") -> str:
    return f"{where}: {problem}. Fix: {fix}" if where else f"{problem}. Fix: {fix}"


def near(word: str, known: Iterable[str]) -> str:
    """Return a fix for an unknown name: the name that was probably meant, or all known names."""
    names = sorted(known)
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.65)
    if close:
        return f"did you mean '{by_lower[close[0]]}'?"
    return f"use one of: {', '.join(names)}" if names else "remove it"


MASK = "[masked]"

_PREFIXED = re.compile(
    # A vendor's prefix and a delimiter stay visible, because they show the kind of key.
    r"(?<![A-Za-z0-9])(sha256:|(?:sk|pk|rk|gsk|xai|hf|ghp|gho|ghs|ghu|github_pat|glpat|xox[abeprs]|whsec)[-_]"
    r"|AKIA|ASIA|AIza|eyJ|[Bb]earer )(?=[A-Za-z0-9])[A-Za-z0-9+/=._-]{3,}"
)
_UUID = re.compile(r"(?i)(?<![0-9a-f-])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f-])")
_WORD = re.compile(r"[A-Za-z0-9+=]{16,}")
# With "-" and "_" names of models are as long, with "/" paths are, so these must look more random.
_LONG = re.compile(r"[A-Za-z0-9+=_-]{32,}|(?<![\w./+])[A-Za-z0-9+/]{40}(?![\w./+])")

_TURNS = 5  # Changes between lower case, upper case and digits. Names of models and settings have fewer in one word.


def masked(text: str) -> str:
    """Return the text with everything that looks like a key, a token or a hash replaced by ``[masked]``.

    A vendor's prefix like ``sk-`` stays. Names of models and settings aren't masked.
    """
    text = _PREFIXED.sub(lambda found: f"{found[1]}{MASK}", text)
    text = _UUID.sub(MASK, text)
    text = _WORD.sub(lambda found: MASK if _turns(found[0], 8) else found[0], text)
    return _LONG.sub(lambda found: MASK if _turns(found[0], 2) else found[0], text)


def _turns(word: str, most: int) -> bool:
    """Return whether a word changes between kinds of character once in ``most`` characters or more often."""
    kinds = ["0" if c.isdigit() else "a" if c.islower() else "A" for c in word if c.isalnum()]
    turns = sum(one != other for one, other in itertools.pairwise(kinds))
    return "0" in kinds and turns >= _TURNS and turns * most >= len(kinds)


Path = tuple[str | int, ...]  # the keys and indices from the root to a value


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """A plain scalar that versions of YAML read differently: ``12:30:45``, ``010``, ``2024-10-21``.

    Valid only for a date. ``text`` is the date's text in the file.
    """

    meaning: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A scalar, list, or mapping.

    ``line`` is the line of its key; without a key, its own line, which is always ``start``. ``text`` is a scalar's text
    in the file. ``substituted`` marks text from the environment, which no message may show.
    """

    line: int
    start: int
    value: str | int | float | bool | Ambiguous | list[Node] | dict[str, Node] | None
    text: str = ""
    substituted: bool = False

    @property
    def items(self) -> list[Node]:
        """Return the items of a list; for other values, an empty list."""
        return self.value if isinstance(self.value, list) else []

    @property
    def settings(self) -> dict[str, Node]:
        """Return the entries of a mapping; for other values, an empty mapping."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def is_scalar(self) -> bool:
        return not isinstance(self.value, list | dict)


def empty(line: int) -> Node:
    return Node(line, line, {})


def plain(node: Node) -> object:
    if isinstance(node.value, dict):
        return {key: plain(value) for key, value in node.value.items()}
    return [plain(item) for item in node.value] if isinstance(node.value, list) else node.value


def find(node: Node, path: Path) -> tuple[Node, Path]:
    """Return the deepest existing node on the path below a node, and the path to it."""
    for depth, part in enumerate(path):
        if isinstance(part, str) and part in node.settings:
            node = node.settings[part]
        elif isinstance(part, int) and part < len(node.items):
            node = node.items[part]
        else:
            return node, path[:depth]
    return node, path


def line_of(root: Node, path: Path) -> int:
    return find(root, path)[0].line


def dotted(path: Path) -> str:
    """Return a path as people write it: ``models[0].match``."""
    words = "".join(f"[{part}]" if isinstance(part, int) else f".{shown(part)}" for part in path)
    return words.removeprefix(".")


def got(node: Node, *, read: bool = True) -> str:
    """Describe a value for a message. ``read``: also say how YAML reads a plain value that isn't text."""
    if not node.is_scalar:
        return "a list" if isinstance(node.value, list) else "a mapping"
    if node.value is None:
        return shown(node.text) or "nothing"
    if isinstance(node.value, str) or not (read or isinstance(node.value, Ambiguous)):
        return shown(node.text)
    return f"'{shown(node.text)}', which YAML reads as {reading(node)}"


def reading(node: Node) -> str:
    """Name the type that YAML gives to a scalar that isn't text."""
    if isinstance(node.value, Ambiguous):
        return node.value.meaning
    return f"the truth value {str(node.value).lower()}" if isinstance(node.value, bool) else "a number"


def shown(text: str, limit: int = 60) -> str:
    """Return text of the file for a message: on one line, printable, and short."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= limit else line[: limit - 1] + "…"


_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_TRUTH = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
_BASES = {"0x": 16, "0b": 2}
# No setting needs a longer number, and Python can't parse numbers with thousands of digits.
_LONGEST_NUMBER = 100


def typed(kind: str, text: str) -> str | int | float | bool | Ambiguous | None:
    """Return a plain scalar as YAML 1.1 reads it, or ``Ambiguous`` if YAML 1.2 reads another value."""
    if kind == "null":
        return None
    if kind == "bool":
        return _TRUTH[text.lower()]
    if kind == "timestamp":
        return Ambiguous("a date", text)
    if kind in ("int", "float"):
        return _number(kind, text)
    return text


def _number(kind: str, text: str) -> int | float | Ambiguous:
    if _SEXAGESIMAL.fullmatch(text):
        return Ambiguous("a number to base 60")
    if len(text) > _LONGEST_NUMBER:
        return Ambiguous("a number of too many digits")
    bare = text.replace("_", "").lower()
    if kind == "float":
        return float(bare.replace(".inf", "inf").replace(".nan", "nan"))
    unsigned = bare.lstrip("+-")
    base = _BASES.get(unsigned[:2], 10)
    if base != 10 and len(unsigned) == 2:
        return Ambiguous("a number without digits")
    if base == 10 and len(unsigned) > 1 and unsigned.startswith("0"):
        return Ambiguous("a number to base 8")
    return int(bare, base)


MAX_BYTES = 1_000_000
MAX_NODES = 100_000
MAX_DEPTH = 40


def parse(content: bytes, first: int = 1) -> Node:
    """Return the tree of a file's content. An empty file is an empty mapping. Raises ``Issues``.

    ``first`` is the number of the file's first line.
    """
    if len(content) > MAX_BYTES:
        raise _invalid(first, f"the file is over {MAX_BYTES:,} bytes", "give the path of a configuration")
    loader = yaml.SafeLoader(_decoded(content, first))
    loader.line = first - 1  # PyYAML counts on from here in all of its marks
    reader = _Reader(loader, first)
    try:
        root = reader.document()
    except yaml.MarkedYAMLError as error:
        found = _syntax_issue(error, content.split(b"\n"), first, reader.brackets)
    else:
        if reader.issues:
            raise Issues(reader.issues)
        return root
    finally:
        loader.dispose()
    # Raise outside the handler, so that the error doesn't reference the parser's error.
    raise Issues([found])


def _invalid(line: int, problem: str, fix: str) -> Issues:
    return Issues([issue(line, problem, fix)])


class _Reader:
    """Builds the tree from the parser's events.

    The parser yields events without recursion, so the reader can check depth and number of nodes first.
    """

    def __init__(self, loader: yaml.SafeLoader, first: int) -> None:
        self._loader = loader
        self._first = first
        self._anchors: dict[str, tuple[Node, int] | None] = {}
        self._nodes = 0
        self.issues: list[Issue] = []
        self.brackets: list[int] = []
        """The lines of open brackets."""

    def document(self) -> Node:
        self._next()  # the start of the stream
        if isinstance(self._next(), StreamEndEvent):
            return empty(self._first)
        root = self._node(self._next(), depth=0)
        self._next()  # the end of the document
        after = self._next()
        if isinstance(after, DocumentStartEvent):
            raise _invalid(_line(after), "a second YAML document begins here", "remove the '---'")
        if root.value is None:
            return empty(self._first)
        if not isinstance(root.value, dict):
            fix = "upstreams: {main: {base_url: https://api.openai.com/v1}}"
            raise _invalid(root.line, "the file must hold settings as 'name: value'", fix)
        return root

    def _next(self) -> Event:
        event: Event = self._loader.get_event()  # type: ignore[no-untyped-call]
        return event

    def _until_end(self) -> Iterator[NodeEvent]:
        while isinstance(event := self._next(), NodeEvent):
            yield event

    def _node(self, event: Event, depth: int) -> Node:
        line = _line(event)
        if depth > MAX_DEPTH:
            raise _invalid(line, f"nested more than {MAX_DEPTH} levels deep", "remove the nesting")
        if isinstance(event, AliasEvent):
            return self._alias(event.anchor or "", line)
        assert isinstance(event, ScalarEvent | CollectionStartEvent)  # noqa: S101 - narrows the type
        if (anchor := event.anchor) is not None:
            self._anchors[anchor] = None
        before = self._nodes
        self._count(line, 1)
        if event.tag not in (None, "!", "tag:yaml.org,2002:str"):
            raise _invalid(line, f"the tag '{shown(event.tag)}' isn't supported", "write a plain value")
        node = self._scalar(event, line) if isinstance(event, ScalarEvent) else self._collection(event, line, depth)
        if anchor is not None:
            self._anchors[anchor] = (node, self._nodes - before)
        return node

    def _count(self, line: int, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise _invalid(line, f"expands to over {MAX_NODES:,} values", "write fewer aliases")

    def _alias(self, name: str, line: int) -> Node:
        if name not in self._anchors:
            raise _invalid(line, f"'*{name}' refers to no anchor", f'put text in quotes, as in "*{name}"')
        known = self._anchors[name]
        if known is None:
            raise _invalid(line, f"'*{name}' is inside its own anchor", "write the value out")
        self._count(line, known[1])
        return known[0]

    def _scalar(self, event: ScalarEvent, line: int) -> Node:
        text = event.value
        if event.style is not None or event.tag is not None:
            return Node(line, line, text, text)
        tag = self._loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        return Node(line, line, typed(tag.rpartition(":")[2], text), text)

    def _collection(self, event: CollectionStartEvent, line: int, depth: int) -> Node:
        if event.flow_style:
            self.brackets.append(line)
        if isinstance(event, SequenceStartEvent):
            node = Node(line, line, [self._node(item, depth + 1) for item in self._until_end()])
        else:
            node = Node(line, line, self._mapping(depth + 1))
        if event.flow_style:
            self.brackets.pop()
        return node

    def _mapping(self, depth: int) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for event in self._until_end():
            line = _line(event)
            key = self._key(event, self._node(event, depth))
            value = self._node(self._next(), depth)
            if key in found:
                problem = f"'{shown(key)}' is a duplicate (first on line {found[key].line - self._first + 1})"
                self.issues.append(issue(line, problem, "keep one of them"))
            elif key is not None:
                found[key] = replace(value, line=line)
        return found

    def _key(self, event: NodeEvent, node: Node) -> str | None:
        """Return a key's name. If it isn't text, add an error and return ``None``."""
        if not node.is_scalar:
            problem, fix = "a list or mapping can't be a name", "in { } put text with { in quotes"
        elif isinstance(event, ScalarEvent) and event.value == "<<" and event.style is event.tag is None:
            problem = "merge keys ('<<') aren't supported"
            fix = "write the settings out, or use extends in a policy"
        elif isinstance(node.value, str):
            return node.value
        else:
            problem = f"the name {got(node)} must be text"
            fix = f'put it in quotes, as in "{shown(node.text)}": …'
        self.issues.append(issue(_line(event), problem, fix))
        return None


def _line(event: Event) -> int:
    return 1 if event.start_mark is None else int(event.start_mark.line) + 1


def _decoded(content: bytes, first: int) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = first + content[: error.start].count(b"\n")
        raise _invalid(line, "the line isn't UTF-8", "save the file as UTF-8") from None
    found = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if found is not None:
        line = first + text.count("\n", 0, found.start())
        raise _invalid(line, "the line holds a control character", "remove it")
    return text


# Fixes for common mistakes, by the parser's message. The first match wins.
_ADVICE = (
    (re.compile(r"while scanning an alias"), "put a value that begins with * in quotes, as in \"*\""),
    (re.compile(r"'\\t'"), "indent with spaces, not tabs"),
    (re.compile(r"character '(.)' that cannot start"), "put a value that begins with this character in quotes"),
    (re.compile(r"mapping values are not allowed"), "put text that holds ': ' in quotes, or correct the indentation"),
    (re.compile(r"unexpected end of stream|stream end"), "close the quote or bracket that opens here"),
    (re.compile(r"expected ',' or '[}\]]'"), "close the { or [ that opens above, or put a comma between its settings"),
    (re.compile(r"expected <block end>"), "correct the indentation: names of one level begin in one column"),
)  # fmt: skip


def _syntax_issue(error: yaml.MarkedYAMLError, lines: list[bytes], first: int, brackets: list[int]) -> Issue:
    problem = error.problem or "cannot be read"
    words = f"{error.context or ''} {problem}"
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else first
    if "quoted scalar" in words and error.context_mark is not None:
        line = error.context_mark.line + 1
    elif "stream end" in words and brackets:
        line = brackets[-1]
    if b"${" in b"".join(lines[line - first : line - first + 1]):
        advice = 'inside { } and [ ] put a variable in quotes, as in "${NAME}"'
    else:
        advice = next((advice for pattern, advice in _ADVICE if pattern.search(words)), "put the text in quotes")
    return issue(line, f"not valid YAML ({shown(problem)})", advice)


_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<inside>[^{}]*)\}|\$\{")
_INSIDE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-.*)?", re.DOTALL)
# How LiteLLM, shells and GitHub Actions write a variable. Without braces it would be sent as the key.
_ELSEWHERE = re.compile(r"(?:os\.environ/|env[:/]|\$)([A-Za-z_][A-Za-z0-9_]*)|\$?\{\{ *(?:env\.|secrets\.)(\w+) *\}\}")


def substitute(root: Node, environ: Mapping[str, str]) -> Node:
    """Return the tree with every variable replaced by its value. Raises ``Issues`` for variables that aren't set."""
    issues: list[Issue] = []
    replaced = _replaced(root, environ, issues)
    if issues:
        raise Issues(issues)
    return replaced


def _replaced(node: Node, environ: Mapping[str, str], issues: list[Issue]) -> Node:
    if isinstance(node.value, dict):
        return replace(node, value={key: _replaced(value, environ, issues) for key, value in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, value=[_replaced(item, environ, issues) for item in node.value])
    if not isinstance(node.value, str):
        return node
    if (found := _ELSEWHERE.fullmatch(node.value)) is not None:
        fix = f'"${{{found[1] or found[2]}}}"'
        issues.append(issue(node.start, "isn't how variables are written here", fix))
        return node
    if "${" not in node.value:
        return node
    text = _REFERENCE.sub(lambda match: _value(match, node.start, environ, issues), node.value)
    return replace(node, value=text, text=text, substituted=True)


def _value(match: re.Match[str], line: int, environ: Mapping[str, str], issues: list[Issue]) -> str:
    if match[0] == "$${":
        return "${"
    inside = _INSIDE.fullmatch(match["inside"] or "")
    if inside is None:
        # The text in the braces isn't quoted: it may be a key.
        form = "write ${NAME} or ${NAME:-default}, and $${ for a literal ${"
        issues.append(issue(line, "the text after '${' isn't the name of a variable", form))
        return ""
    name, default = inside["name"], inside["default"]
    value = environ.get(name)
    if default is not None:
        return value or str(default[2:])
    if value is None:
        # A default isn't offered: most variables hold secrets.
        issues.append(issue(line, f"${{{name}}} isn't set", f"export {name}=VALUE"))
    return value or ""
