"""Merge the files of a configuration into one tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from proxy.config.document import parse
from proxy.config.environment import substitute
from proxy.config.issues import Issue, Issues, issue, near
from proxy.config.messages import section_wanted
from proxy.config.sources import Pattern, Source, Sources, extended
from proxy.config.tree import Node, empty, shown

SHARED = ("policies", "teams")
"""The sections that several files may contain."""

INCLUDE = "include"


class Assembly:
    """Reads and merges the trees of files."""

    def __init__(self, sources: Sources, environ: Mapping[str, str]) -> None:
        self.sources = sources
        self._issues: list[Issue] = []
        self._environ = environ

    def tree(self) -> Node:
        """Return the merged tree, with lines counted over all files.

        Raises ``Issues``, and ``ConfigurationError`` for too many files.
        """
        roots = [(source, self._root(source)) for source in self.sources.files]
        including = [pattern for source, root in roots if not source.owned for pattern in self._included(source, root)]
        self.sources = extended(self.sources, including)
        roots += [(source, self._root(source)) for source in self.sources.files[len(roots) :]]
        merged = self._merged(roots)
        if self._issues:
            raise Issues(sorted(self._issues))
        return merged

    def _report(self, line: int, problem: str, fix: str, where: str = "") -> None:
        self._issues.append(issue(line, problem, fix, where))

    def _root(self, source: Source) -> Node:
        """Return a file's tree. If the file has errors, report them and return an empty tree."""
        if source.unreadable is not None:
            self._report(source.first, f"the file {source.unreadable}", "correct its permissions, or remove it")
            return empty(source.first)
        try:
            return substitute(parse(source.content, source.first), self._environ)
        except Issues as found:
            self._issues += found.issues
            return empty(source.first)

    def _included(self, source: Source, root: Node) -> list[Pattern]:
        """Return the patterns that a file includes. The check of values reports other types."""
        found = []
        for item in root.settings.get(INCLUDE, empty(0)).items:
            if isinstance(item.value, str) and item.value:
                pattern = Pattern(source.path.parent, item.value)
                if not pattern.is_wild and not pattern.files():
                    problem = f"there is no file '{pattern.text}' in '{pattern.folder}'"
                    self._report(item.line, problem, "correct the path", INCLUDE)
                found.append(pattern)
        return found

    def _merged(self, roots: list[tuple[Source, Node]]) -> Node:
        if len(roots) == 1 and not roots[0][0].owned:
            return roots[0][1]
        merged: dict[str, Node] = {}
        for source, root in roots:
            for key, node in root.settings.items():
                known = merged.get(key)
                if source.owned and key not in SHARED:
                    self._misplaced(key, node.line)
                elif key in SHARED:
                    self._share(merged, key, node)
                elif key == INCLUDE and known and isinstance(known.value, list) and isinstance(node.value, list):
                    merged[key] = replace(known, value=[*known.value, *node.value])
                else:
                    self._add(merged, key, node, key, "keep it in one of them")
        return Node(roots[0][1].line, roots[0][1].line, merged)

    def _add(self, known: dict[str, Node], key: str, node: Node, where: str, fix: str) -> None:
        if key in known:
            self._report(node.line, f"is also in another file ({self.sources.place(known[key].line)})", fix, where)
        else:
            known[key] = node

    def _share(self, merged: dict[str, Node], key: str, node: Node) -> None:
        """Add a file's policies or teams to those of the others."""
        if not isinstance(node.value, dict):
            self._report(node.line, *section_wanted(node, key), key)
            return
        shared = merged.setdefault(key, replace(node, value={})).settings
        for name, value in node.value.items():
            self._add(shared, name, value, f"{key}.{shown(name)}", "keep one of them, or rename one")

    def _misplaced(self, key: str, line: int) -> None:
        hint = near(key, SHARED)
        if not hint.startswith("did"):
            hint = "move it to the file that includes this one"
            if self.sources.entry.is_dir():
                hint = "move it to a file next to the folder policies/"
        self._report(line, "this file may only hold 'policies' and 'teams'", hint, shown(key))
