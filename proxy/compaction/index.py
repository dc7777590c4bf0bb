"""List the names that are probably needed again as a map: each with the file to which it belongs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain, pairwise

from msgspec.structs import replace

from proxy.compaction import keeps
from proxy.compaction.format import TextCounter
from proxy.compaction.identifiers import FILES, Mention, Names, ranking, search_in
from proxy.compaction.named_files import native
from proxy.compaction.pieces import pause

MARKS = {"written": " (written)", "read": " (read)"}
"""The kinds that the index lists first, each with its mark behind the folder."""

SMALL = 3  # the most files of a folder that are listed with those of its parent
SHARED = 2  # the files of a folder that make it likely that a relative path begins there

_LABELS = {"url": "URLs", "flag": "flags", "name": "names", "proper": "names"}
"""The labels of names without a file. Other kinds are ``_FIGURES``."""

_FIGURES = "ids and figures"

_FOLDER_TOKENS = 10  # About the tokens of a folder's line. The exact size is known when the lines are written.

_RARE = ("url", "ticket", "code", "email", "amount")
_WITH_DIGITS = ("name", *FILES)
_DIGITS = re.compile(r"\d{3}")

_ROUNDS = 3  # times that names are chosen, with more tokens if the list became shorter than expected
_NAME_TOKENS = 6  # about the tokens of a name that is taken off a list that became too long
_LEAST_SAVING = 20  # characters that naming a folder once must save


def index(found: Names, shown: str, max_tokens: int, count: TextCounter) -> str:
    """List the likeliest names that ``shown`` doesn't contain, in at most ``max_tokens`` tokens.

    Files are listed by folder, each with its names behind it. Those that calls wrote or read come first, each kind with
    its mark. Names that belong to no file follow. If the list is long and has a file that isn't shown, it also has the
    file's names that are shown elsewhere.
    """
    found = _folded(found)
    names = ranking(found)
    rare = [name for name in names if _is_rare(name, found[name])]
    in_text, size = search_in(shown), cache(count)

    @cache  # each round asks for the same names again
    def is_shown(name: str) -> bool:
        return in_text(native(name))

    repeats, room = max_tokens >= keeps.LONG_INDEX, max_tokens
    for _ in range(_ROUNDS):
        choice = _Choice(found, is_shown, size, repeats=repeats)
        choice.add(rare, int(room * keeps.RARE_PART))
        choice.add(names, room)
        lines = "\n".join(choice.lines())
        left = max_tokens - count(lines)
        if 0 <= left <= _NAME_TOKENS or len(choice.names) == len(names):
            break
        # Files that share a line took less than expected.
        room += left
    while left < 0 and choice.names:
        del choice.names[-(1 - left // _NAME_TOKENS) :]
        lines = "\n".join(choice.lines())
        left = max_tokens - count(lines)
    return lines if choice.names else ""


def _is_rare(name: str, mention: Mention) -> bool:
    """Return whether a model can't guess a name from others like it."""
    if mention.kind in _WITH_DIGITS:
        return not mention.file and _DIGITS.search(name, name.rfind("/") + 1) is not None
    return mention.kind in _RARE


class _Choice:
    """The names to list, and about the tokens that they take with their files and folders."""

    def __init__(self, found: Names, is_shown: Callable[[str], bool], count: TextCounter, *, repeats: bool) -> None:
        """Take all names. With ``repeats``, listed files also have names that the prompt shows without them."""
        self.names: list[str] = []
        self._found = found
        self._repeats = repeats
        self._is_shown = is_shown
        self._count = count
        self._files: set[str] = set()
        self._folders: set[tuple[str, str]] = set()
        self._listed = ""
        self._tokens = 0

    def add(self, names: Sequence[str], most: int) -> None:
        """Add the first names that aren't shown, until the choice has about ``most`` tokens."""
        for name in names:
            if most - self._tokens < 2:
                return
            mention = self._found[name]
            is_file = mention.kind in FILES
            file = name if is_file else mention.file
            # Files that are listed repeat the names that the prompt shows without them.
            repeats = self._repeats and not is_file and file in self._files
            if self._is_shown(name) and not repeats:
                continue
            text = _split(name)[1] if is_file else name
            cost = 0 if is_file else self._count(f" {text}")
            if file and file not in self._files:
                folder, last = _split(file)
                is_new = (folder, self._found[file].kind) not in self._folders
                cost += self._count(f" {last}") + (_FOLDER_TOKENS if is_new else 0)
            if self._tokens + cost > most or name in self._listed:
                continue
            if file:
                self._files.add(file)
                self._folders.add((_split(file)[0], self._found[file].kind))
            self._tokens += cost
            self._listed = f"{self._listed} {text}"
            self.names.append(name)

    def lines(self) -> list[str]:
        """Return the lines of the index."""
        inside: dict[str, list[str]] = {}
        rest: dict[str, list[str]] = {}
        for name in self.names:
            mention = self._found[name]
            if mention.kind in FILES:
                inside.setdefault(name, [])
            elif mention.file:
                inside.setdefault(mention.file, []).append(name)
            else:
                rest.setdefault(_LABELS.get(mention.kind, _FIGURES), []).append(name)
        if not inside and len(rest) > 1 and not self._repeats:  # labels would take the room of names
            return [f"- {' '.join(chain.from_iterable(rest.values()))}"]
        labelled = [f"- {label}: {' '.join(names)}" for label, names in sorted(rest.items())]
        return [*_lines(inside, self._found), *labelled]


_DOTS = re.compile(r"^(?:\.{0,2}/)+")


def _folded(found: Names) -> Names:
    """Return the names with each relative path added to the longer path that means the same file."""
    longer = _longer([name for name in found if found[name].kind in FILES])
    folded: Names = {}
    for name, mention in found.items():
        whole = longer.get(name, name) if mention.kind in FILES else name
        folded[whole] = _sum(mention, folded[whole]) if whole in folded else mention
    for name, mention in folded.items():
        if mention.file:
            file = longer.get(mention.file, mention.file)
            folded[name] = replace(mention, file=file if file in folded else "")
    return folded


def _longer(files: Sequence[str]) -> dict[str, str]:
    """Return the whole paths of relative ones: those that end with them, or that have their first folder."""
    by_ending: dict[str, str] = {}
    roots: dict[str, Counter[str]] = {}
    longer: dict[str, str] = {}
    for name in sorted(files, key=lambda name: (-len(name), name)):
        pause()
        whole = by_ending.get(f"/{_DOTS.sub('', name, 1)}")
        if whole is not None:
            longer[name] = whole
            continue
        places = [at for at, character in enumerate(name) if character == "/"]
        by_ending |= {name[at:]: name for at in places}
        if name.startswith("/") or name[1:3] == "$/":
            for start, end in pairwise(places):
                roots.setdefault(name[start + 1 : end], Counter())[name[:start]] += 1
    for name in files:
        first, separator, _ = name.partition("/")
        if separator and name not in longer and first in roots:
            root, number = roots[first].most_common(1)[0]
            if number >= SHARED:
                longer[name] = f"{root}/{name}"
    return longer


def _sum(one: Mention, other: Mention) -> Mention:
    return Mention(
        min(one.kind, other.kind, key=FILES.index),
        one.count + other.count,
        one.texts + other.texts,
        one.calls + other.calls,
        one.said + other.said,
        max(one.last, other.last),
        weight=max(one.weight, other.weight),
    )


def _lines(inside: Mapping[str, Sequence[str]], found: Names) -> list[str]:
    """Return the lines of files, each with its names. A folder that many of them share is named once."""
    files = sorted(inside, key=lambda name: -found[name].weight if found[name].kind == "written" else 0)
    lines: list[str] = []
    while root := _root(files):
        below = {name: name[len(root) :] for name in files if name.startswith(root)}
        lines += [f"- in {native(root)}:", *(f"  {line}" for line in _marked(below, inside, found))]
        files = [name for name in files if name not in below]
    return [*lines, *_marked({name: native(name, "/") for name in files}, inside, found)]


def _marked(paths: Mapping[str, str], inside: Mapping[str, Sequence[str]], found: Names) -> list[str]:
    """Return the lines of files. Their paths are by their names, and may be relative to a line before."""
    lines = []
    for kinds in (("written",), ("read",), ("file", "path")):
        chosen = {path: inside[name] for name, path in paths.items() if found[name].kind in kinds}
        lines += _by_folder(chosen, MARKS.get(kinds[0], ""))
    return lines


def _root(files: Sequence[str]) -> str:
    """Return the folder that saves the most characters if it's named once, with a slash at its end; empty for none."""
    lines = {f"{_split(file)[0]}/" for file in files}
    below = Counter(line[: place + 1] for line in lines for place, c in enumerate(line) if c == "/" and place)
    # The root takes a line of its own, and the lines below are indented.
    savings = {folder: (number - 1) * len(folder) - 4 * number - 8 for folder, number in below.items()}
    best = max(sorted(savings), key=savings.__getitem__, default="")
    return best if best and savings[best] > _LEAST_SAVING else ""


def _split(path: str) -> tuple[str, str]:
    """Return the folder and the name of a file. A name with spaces is quoted, because spaces separate names."""
    folder, separator, name = path.rpartition("/")
    return folder if separator else ".", f'"{name}"' if " " in name else name


def _by_folder(paths: Mapping[str, Sequence[str]], mark: str) -> list[str]:
    """Return a line per folder, with the names of each file. Several small folders share the line of their parent."""
    sizes = Counter(_split(path)[0] for path in paths)
    small = Counter(folder.rpartition("/")[0] for folder, size in sizes.items() if size <= SMALL)
    shared = {parent for parent, folders in small.items() if parent and (parent in sizes or folders > 1)}
    lines: dict[str, list[str]] = {}
    for path, names in paths.items():
        folder, name = _split(path)
        parent, _, last = folder.rpartition("/")
        if sizes[folder] <= SMALL and parent in shared and folder not in shared:
            folder, name = parent, f"{last}/{name}"
        lines.setdefault(folder, []).append(f"{name}: {' '.join(names)};" if names else name)
    return [f"- {folder}/{mark}: {' '.join(names)}".removesuffix(";") for folder, names in lines.items()]
