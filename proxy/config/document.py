"""Parse YAML into a tree of values with their lines.

The parser is stricter than YAML, because these features cause mistakes in production. It rejects tags, duplicate keys,
merge keys, and second documents. It limits size, depth, and number of nodes, and counts aliases in expanded form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    NodeEvent,
    ScalarEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)

from proxy.config.faults import Issue, Issues, said
from proxy.config.scalars import typed
from proxy.config.tree import Mapping, Node, Scalar, Sequence, got, shown

MAX_BYTES = 1_000_000
MAX_NODES = 100_000
MAX_DEPTH = 40


def parse(content: bytes) -> Mapping:
    """Return the tree of a file's content. An empty file is an empty mapping. Raises ``Issues``."""
    if len(content) > MAX_BYTES:
        raise Issues([Issue(1, said(f"the file is over {MAX_BYTES:,} bytes", "give the path of a configuration"))])
    loader = yaml.SafeLoader(_decoded(content))
    reader = _Reader(loader)
    try:
        root = reader.document()
    except yaml.MarkedYAMLError as error:
        fault = _syntax_fault(error, content, reader.brackets)
    else:
        if reader.faults:
            raise Issues(reader.faults)
        return root
    finally:
        loader.dispose()
    # Raise outside the handler, so that the error doesn't reference the parser's error.
    raise Issues([fault])


class _Reader:
    """Builds the tree from the parser's events.

    The parser yields events without recursion, so the reader can check depth and number of nodes first.
    """

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._anchors: dict[str, tuple[Node, int] | None] = {}
        self._nodes = 0
        self.faults: list[Issue] = []
        self.brackets: list[int] = []
        """The lines of open brackets."""

    def document(self) -> Mapping:
        self._take(StreamStartEvent)
        first = self._next()
        if isinstance(first, StreamEndEvent):
            return Mapping(1)
        root = self._node(self._next(), depth=0)
        self._take(DocumentEndEvent)
        second = self._next()
        if isinstance(second, DocumentStartEvent):
            raise Issues([Issue(_line(second), said("a second YAML document begins here", "remove the '---'"))])
        if isinstance(root, Scalar) and root.value is None:
            return Mapping(1)
        if not isinstance(root, Mapping):
            raise Issues(
                [
                    Issue(
                        root.line,
                        said(
                            "the file must hold settings as 'name: value'",
                            "upstreams: {main: {base_url: https://api.openai.com/v1}}",
                        ),
                    )
                ]
            )
        return root

    def _next(self) -> Event:
        event: Event = self._loader.get_event()  # type: ignore[no-untyped-call]
        return event

    def _take(self, kind: type[Event]) -> None:
        event = self._next()
        if not isinstance(event, kind):  # pragma: no cover - the parser's own grammar forbids it
            raise TypeError(f"expected {kind.__name__}, got {event!r}")

    def _node(self, event: Event, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise Issues([Issue(_line(event), said(f"nested more than {MAX_DEPTH} levels deep", "remove the nesting"))])
        if isinstance(event, AliasEvent):
            return self._alias(event)
        if isinstance(event, NodeEvent) and event.anchor is not None:
            self._anchors[event.anchor] = None
        before = self._nodes
        self._count(event, 1)
        node = self._bracketed(event, depth) if isinstance(event, CollectionStartEvent) else self._scalar(event)
        if isinstance(event, NodeEvent) and event.anchor is not None:
            self._anchors[event.anchor] = (node, self._nodes - before)
        return node

    def _count(self, event: Event, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise Issues([Issue(_line(event), said(f"expands to over {MAX_NODES:,} values", "write fewer aliases"))])

    def _alias(self, event: AliasEvent) -> Node:
        name = event.anchor
        if name not in self._anchors:
            raise Issues(
                [
                    Issue(
                        _line(event),
                        said(f"'*{name}' refers to no anchor", f'put text in quotes, as in "*{name}"'),
                    )
                ]
            )
        known = self._anchors[name]
        if known is None:
            raise Issues([Issue(_line(event), said(f"'*{name}' is inside its own anchor", "write the value out"))])
        self._count(event, known[1])
        return known[0]

    def _bracketed(self, event: CollectionStartEvent, depth: int) -> Node:
        if event.flow_style:
            self.brackets.append(_line(event))
        node = self._collection(event, depth)
        if event.flow_style:
            self.brackets.pop()
        return node

    def _collection(self, event: CollectionStartEvent, depth: int) -> Node:
        self._refuse_tag(event, event.tag)
        if isinstance(event, SequenceStartEvent):
            return Sequence(_line(event), tuple(self._node(item, depth + 1) for item in self._until_end()))
        mapping = Mapping(_line(event))
        for key_event in self._until_end():
            key = self._key(key_event, depth)
            value = self._node(self._next(), depth + 1)
            if key is None:
                continue
            if key in mapping.items:
                first = mapping.lines[key]
                message = said(f"'{shown(key)}' is a duplicate (first on line {first})", "keep one of them")
                self.faults.append(Issue(_line(key_event), message))
                continue
            mapping.items[key] = value
            mapping.lines[key] = _line(key_event)
        return mapping

    def _until_end(self) -> Iterator[Event]:
        while isinstance(event := self._next(), NodeEvent):
            yield event

    def _key(self, event: Event, depth: int) -> str | None:
        """Return a key's name. If it isn't text, add an error and return ``None``."""
        node = self._node(event, depth + 1)
        if not isinstance(node, Scalar):
            self.faults.append(
                Issue(_line(event), said("a list or mapping can't be a name", "in { } put text with { in quotes"))
            )
            return None
        if node.plain and node.text == "<<":
            message = said("merge keys ('<<') aren't supported", "write the settings out, or use extends in a policy")
            self.faults.append(Issue(_line(event), message))
            return None
        if isinstance(node.value, str):
            return node.value
        self.faults.append(
            Issue(
                _line(event),
                said(f"the name {got(node)} must be text", f'put it in quotes, as in "{shown(node.text)}": …'),
            )
        )
        return None

    def _scalar(self, event: Event) -> Scalar:
        assert isinstance(event, ScalarEvent)  # noqa: S101 - narrows the type; the caller handles collections and aliases
        self._refuse_tag(event, event.tag)
        text, line = event.value, _line(event)
        is_plain = event.style is None
        if not is_plain or event.tag is not None:
            return Scalar(line, text, text, plain=False)
        tag = self._loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        return Scalar(line, typed(tag.rpartition(":")[2], text), text, plain=True)

    def _refuse_tag(self, event: Event, tag: str | None) -> None:
        if tag not in (None, "!", "tag:yaml.org,2002:str"):
            raise Issues(
                [Issue(_line(event), said(f"the tag '{shown(tag or '')}' isn't supported", "write a plain value"))]
            )


def _line(event: Event) -> int:
    mark = event.start_mark
    return 1 if mark is None else int(mark.line) + 1


def _decoded(content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise Issues([Issue(line, said("the line isn't UTF-8", "save the file as UTF-8"))]) from None
    found = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        raise Issues([Issue(line, said("the line holds a control character", "remove it"))])
    return text


# Fixes for common mistakes, by the parser's message. The first match wins.
_ADVICE = (
    (re.compile(r"while scanning an alias"), "put a value that begins with * in quotes, as in \"*\""),
    (re.compile(r"'\\t'"), "indent with spaces, not tabs"),
    (re.compile(r"character '(.)' that cannot start"), "put a value that begins with this character in quotes"),
    (re.compile(r"mapping values are not allowed"), "put text that holds ': ' in quotes, or correct the indentation"),
    (re.compile(r"unexpected end of stream|stream end"), "close the quote or bracket that opens here"),
    (re.compile(r"expected <block end>"), "correct the indentation: names of one level begin in one column"),
)  # fmt: skip


def _syntax_fault(error: yaml.MarkedYAMLError, content: bytes, brackets: list[int]) -> Issue:
    """Return the parser's error with a fix."""
    problem = error.problem or "cannot be read"
    words = f"{error.context or ''} {problem}"
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 1
    if "quoted scalar" in words and error.context_mark is not None:
        line = error.context_mark.line + 1
    elif "stream end" in words and brackets:
        line = brackets[-1]
    if b"${" in b"".join(content.split(b"\n", line)[line - 1 : line]):
        advice = 'inside { } and [ ] put a variable in quotes, as in "${NAME}"'
    else:
        advice = next((advice for pattern, advice in _ADVICE if pattern.search(words)), "put the text in quotes")
    return Issue(line, said(f"not valid YAML ({shown(problem)})", advice))
