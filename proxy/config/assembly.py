"""Merge the files of a configuration into one tree."""

from __future__ import annotations

from collections.abc import Mapping as Environ

from proxy.config.document import parse
from proxy.config.environment import substitute
from proxy.config.faults import Issue, Issues, near, said
from proxy.config.messages import settings_wanted
from proxy.config.sources import Pattern, Source, Sources, extended
from proxy.config.tree import Mapping, Node, Scalar, Sequence, shown

SHARED = ("policies", "teams")
"""The sections that several files may contain."""

INCLUDE = "include"


class Assembly:
    """Reads and merges the trees of files. ``faults`` has the errors, with lines counted over all files."""

    def __init__(self, sources: Sources, environ: Environ[str, str]) -> None:
        self.sources = sources
        self.faults: list[Issue] = []
        self._environ = environ

    def tree(self) -> Mapping:
        """Return the merged tree. Raises ``Issues``, and ``ConfigurationError`` for unreadable files."""
        roots = [(source, self._root(source)) for source in self.sources.files]
        including = [pattern for source, root in roots if not source.owned for pattern in self._included(source, root)]
        before = len(self.sources.files)
        self.sources = extended(self.sources, including)
        roots += [(source, self._root(source)) for source in self.sources.files[before:]]
        whole = self._merged(roots)
        if self.faults:
            raise Issues(sorted(self.faults))
        return whole

    def _root(self, source: Source) -> Mapping:
        """Return a file's tree. If the file has errors, add them to ``faults`` and return an empty tree."""
        if source.unreadable is not None:
            self.faults.append(
                Issue(source.first, said(f"the file {source.unreadable}", "correct its permissions, or remove it"))
            )
            return Mapping(source.first)
        try:
            root = substitute(parse(source.content), self._environ)
        except Issues as found:
            self.faults += [fault._replace(line=fault.line + source.first - 1) for fault in found.faults]
            return Mapping(source.first)
        return _moved(root, source.first - 1) if source.first > 1 else root

    def _included(self, source: Source, root: Mapping) -> list[Pattern]:
        """Return the patterns that a file includes. The check of values reports other types."""
        node = root.items.get(INCLUDE)
        found = []
        for item in node.items if isinstance(node, Sequence) else ():
            if not isinstance(item, Scalar) or not isinstance(item.value, str) or not item.value:
                continue
            pattern = Pattern(source.path.parent, item.value)
            if not pattern.is_wild and not pattern.files():
                message = said(
                    f"there is no file '{pattern.text}' in '{pattern.folder}'", "correct the path", "include"
                )
                self.faults.append(Issue(item.line, message))
            found.append(pattern)
        return found

    def _merged(self, roots: list[tuple[Source, Mapping]]) -> Mapping:
        if len(roots) == 1 and not roots[0][0].owned:
            return roots[0][1]
        whole = Mapping(roots[0][1].line)
        for source, root in roots:
            for key, value in root.items.items():
                line = root.lines[key]
                if source.owned and key not in SHARED:
                    self._misplaced(key, line)
                elif key in SHARED:
                    self._share(whole, key, value, line)
                elif (
                    key == INCLUDE
                    and isinstance(value, Sequence)
                    and isinstance(known := whole.items.get(key), Sequence)
                ):
                    whole.items[key] = Sequence(known.line, (*known.items, *value.items))
                elif key in whole.items:
                    first = self.sources.place(whole.lines[key])
                    self.faults.append(
                        Issue(line, said(f"is also in another file ({first})", "keep it in one of them", key))
                    )
                else:
                    whole.items[key], whole.lines[key] = value, line
        return whole

    def _misplaced(self, key: str, line: int) -> None:
        hint = near(key, SHARED)
        if not hint.startswith("did"):
            hint = "move it to the file that includes this one"
            if self.sources.entry.is_dir():
                hint = "move it to a file next to the folder policies/"
        self.faults.append(Issue(line, said("this file may only hold 'policies' and 'teams'", hint, shown(key))))

    def _share(self, whole: Mapping, key: str, value: Node, line: int) -> None:
        """Add a file's policies or teams to those of the others."""
        if not isinstance(value, Mapping):
            self.faults.append(Issue(line, said(*settings_wanted(value, key), key)))
            return
        known = whole.items.get(key)
        if not isinstance(known, Mapping):
            whole.items[key], whole.lines[key] = Mapping(value.line, dict(value.items), dict(value.lines)), line
            return
        for name, inner in value.items.items():
            if name in known.items:
                first = self.sources.place(known.lines[name])
                message = said(
                    f"is also in another file ({first})", "keep one of them, or rename one", f"{key}.{shown(name)}"
                )
                self.faults.append(Issue(value.lines[name], message))
                continue
            known.items[name], known.lines[name] = inner, value.lines[name]


def _moved(node: Mapping, by: int) -> Mapping:
    """Return the tree with all lines shifted by ``by``."""
    items = {key: _moved_node(value, by) for key, value in node.items.items()}
    return Mapping(node.line + by, items, {key: line + by for key, line in node.lines.items()})


def _moved_node(node: Node, by: int) -> Node:
    if isinstance(node, Mapping):
        return _moved(node, by)
    if isinstance(node, Sequence):
        return Sequence(node.line + by, tuple(_moved_node(item, by) for item in node.items))
    return Scalar(node.line + by, node.value, node.text, node.plain, node.substituted)
