"""Find, read, and merge the files of a configuration, and detect changes.

A configuration is one file or a folder: all ``*.yaml`` in it, and ``policies/*.yaml`` below it. A file lists others
under ``include``. Files in ``policies/`` and included files contain only policies and teams, so each can have its own
owner.
"""

from __future__ import annotations

import glob
import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from proxy.config.document import MAX_BYTES, Issue, Issues, Node, empty, issue, masked, near, parse, shown, substitute
from proxy.config.messages import section_wanted
from proxy.errors import ConfigurationError

EVERY_FILE = "*.yaml"
OWNED_FILES = "policies/*.yaml"
MOST_FILES = 1_000

_WILD = frozenset("*?[")

Stamp = tuple[tuple[str, tuple[int, ...]], ...]
"""The state of all files of a configuration: path, times of change, size, and inode."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file. If ``owned``, it may only contain policies and teams.

    ``first`` is its first line, counted over all files. ``real`` is its path without links, and ``state`` its state on
    disk before it was read. ``unreadable`` has the reason if it can't be read.
    """

    path: Path
    content: bytes
    owned: bool
    first: int = 1
    real: str = ""
    state: tuple[int, ...] = ()
    unreadable: str | None = None


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern for file names, relative to a folder."""

    folder: Path
    text: str
    owned: bool = True

    def files(self) -> list[Path]:
        """Return the files that match now, sorted by name. Hidden files and folders never match.

        A pipe or device matches, so that it's reported rather than skipped.
        """
        found = glob.glob(self.text, root_dir=self.folder, recursive=True)
        paths = (self.folder / name for name in sorted(found))
        return [path for path in paths if path.exists() and not path.is_dir()]

    @property
    def is_wild(self) -> bool:
        return not _WILD.isdisjoint(self.text)


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of a configuration as read, and the patterns that new files may match."""

    entry: Path
    files: tuple[Source, ...]
    patterns: tuple[Pattern, ...] = ()
    ignored: tuple[Path, ...] = field(default=(), compare=False)
    """Files that the proxy doesn't read, but that probably belong to the configuration (``*.yml``)."""

    def position(self, line: int) -> str:
        """Return ``file:line`` for a line counted over all files."""
        source = self.files[bisect_right([source.first for source in self.files], line) - 1] if self.files else None
        return f"{self.entry}:{line}" if source is None else f"{source.path}:{line - source.first + 1}"

    def located(self, issues: Iterable[Issue]) -> list[str]:
        """Return ``file:line: message`` for each issue, with everything masked that looks like a secret."""
        return [f"{self.position(issue.line)}: {masked(issue.message)}" for issue in issues]

    def stamp(self) -> Stamp:
        """Return the current state of the files on disk, including new ones."""
        named = {os.path.realpath(source.path) for source in self.files}
        named.update(os.path.realpath(path) for pattern in self.patterns for path in pattern.files())
        return tuple(sorted((path, _state(Path(path))) for path in named))

    @property
    def stamp_as_read(self) -> Stamp:
        return tuple(sorted((source.real, source.state) for source in self.files))


def _state(path: Path) -> tuple[int, ...]:
    try:
        return _figures(path.stat())
    except OSError:
        return ()


def _figures(found: os.stat_result) -> tuple[int, ...]:
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def files_at(entry: Path) -> Sources:
    """Return the files at a path, before includes. Raises ``ConfigurationError``."""
    if not entry.is_dir():
        source = _source(entry, owned=False, first=1)
        if source.unreadable is not None:
            raise ConfigurationError(f"{entry}: {source.unreadable}. Fix: give the path of a configuration file")
        return Sources(entry, (source,))
    patterns = (Pattern(entry, EVERY_FILE, owned=False), Pattern(entry, OWNED_FILES))
    ignored = tuple(path for name in ("*.yml", "policies/*.yml") for path in Pattern(entry, name).files())
    sources = extended(Sources(entry, (), ignored=ignored), patterns)
    if not sources.files:
        raise ConfigurationError(f"{entry}: this folder has no *.yaml file. Fix: give the path of a configuration")
    return sources


def extended(sources: Sources, patterns: Sequence[Pattern]) -> Sources:
    """Return the files plus those that more patterns match. Known files don't change.

    Raises ``ConfigurationError`` for over ``MOST_FILES`` files.
    """
    files = list(sources.files)
    known = {source.real or os.path.realpath(source.path) for source in files}
    for pattern in patterns:
        for path in pattern.files():
            real = os.path.realpath(path)
            if real in known:
                continue
            known.add(real)
            if len(files) == MOST_FILES:
                raise ConfigurationError(f"{path}: more than {MOST_FILES:,} files. Fix: include fewer")
            # No file has more lines than bytes, so the lines of two files never meet.
            first = files[-1].first + len(files[-1].content) + 2 if files else 1
            files.append(_source(path, owned=pattern.owned, first=first))
    return Sources(sources.entry, tuple(files), (*sources.patterns, *patterns), sources.ignored)


def _source(path: Path, *, owned: bool, first: int) -> Source:
    """Read a file, up to one byte more than a configuration may have.

    Only regular files are read: a pipe, socket or device could block the thread that reads it, or never end.
    """
    real = os.path.realpath(path)
    state = _state(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return Source(path, b"", owned, first, real, state, "isn't a regular file")
        # The file may be replaced by a pipe after this check. Opening a pipe with O_NONBLOCK doesn't wait.
        with open(path, "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                return Source(path, b"", owned, first, real, state, "isn't a regular file")
            return Source(path, file.read(MAX_BYTES + 1), owned, first, real, _figures(found))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return Source(path, b"", owned, first, real, state, f"can't be read ({reason})")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


SHARED = ("policies", "teams")  # the sections that several files may contain

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
            self._report(node.line, f"is also in another file ({self.sources.position(known[key].line)})", fix, where)
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
