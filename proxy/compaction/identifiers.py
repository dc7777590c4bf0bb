"""Collect the names in texts, and list those that are probably needed again.

Names are files, URLs, identifiers of code, ids, amounts, and dates. Summaries tend to lose them, and agents need them
to continue.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, lru_cache
from heapq import nsmallest
from itertools import filterfalse
from typing import Any, Literal

import msgspec

from proxy.compaction import keeps
from proxy.compaction.format import TextCounter
from proxy.compaction.shorten import SEARCHED
from proxy.constants import UNDECODABLE

Access = Literal["written", "read", "file"]
"""The use of a file by a call; ``file`` if its tool isn't known to read or write."""

WRITING_TOOLS = (
    "write_file",
    "edit_file",
    "write",
    "edit",
    "create_file",
    "multi_edit",
    "str_replace_editor",
    "str_replace_based_edit_tool",
    "apply_patch",
    "Write",
    "Edit",
    "MultiEdit",
    "NotebookEdit",
)
"""Tools of well-known agents whose arguments contain whole files."""

# Names as ``plain_name`` returns them.
_WRITING = {name.lower() for name in WRITING_TOOLS} | {
    "append_file", "apply_diff", "create_new_file", "edit_existing_file", "edit_notebook", "fs_write",
    "insert_content", "insert_edit_into_file", "multi_replace_string_in_file", "replace", "replace_file_content",
    "replace_in_file", "replace_string_in_file", "search_replace", "str_replace", "write_to_file",
}  # fmt: skip
_READING = {
    "cat", "fs_read", "get_file_contents", "notebookread", "open", "open_file", "read", "read_file",
    "read_many_files", "read_multiple_files", "read_notebook", "read_text_file", "readfile", "view", "view_file",
}  # fmt: skip
_VIEWING_COMMANDS = ("view", "read")
"""Values of ``command`` with which a tool that can write only reads."""

_KEYS = (
    "path", "file_path", "filename", "file", "notebook_path", "filePath", "filepath", "target_file", "absolute_path",
    "TargetFile", "AbsolutePath",
)  # fmt: skip
_LISTS = ("paths", "files")

# A line in a patch of ``apply_patch``.
_PATCHED = re.compile(r"^\*\*\* (?:Add|Update|Delete) File: (.{1,300})$|^\*\*\* Move to: (.{1,300})$", re.MULTILINE)


def decoded(arguments: str, **options: Any) -> Any:
    """Return the value of a call's arguments. ``options`` are those of ``json.loads``.

    Raises ``ValueError`` or ``RecursionError`` if they aren't JSON.
    """
    try:
        return msgspec.json.decode(arguments)  # a fifth of the time
    except (*UNDECODABLE, UnicodeEncodeError):
        return json.loads(arguments, **options)


def parsed(arguments: str) -> Any:
    """Return the value of a call's arguments; the arguments themselves if they aren't JSON."""
    try:
        return decoded(arguments)
    except (ValueError, RecursionError):
        return arguments


def named_files(tool: str, arguments: Any) -> Iterator[tuple[Access, str]]:
    """Yield the files in the ``parsed`` arguments of a call, with what the call did with them."""
    fields: Mapping[str, Any] = arguments if isinstance(arguments, dict) else {}
    name = plain_name(tool)
    access = _access(name, fields)
    if name == "apply_patch":
        patch = arguments if isinstance(arguments, str) else fields.get("input", fields.get("patch"))
        if isinstance(patch, str):
            yield from (("written", path) for found in _PATCHED.findall(patch) for path in found if path)
    for value in _values(fields):
        if isinstance(value, str) and 0 < len(value) <= 300 and "\n" not in value:
            yield access, value


def handles_files(tool: str) -> bool:
    """Return whether a tool is known to read or write files."""
    name = plain_name(tool)
    return name in _READING or name in _WRITING


@lru_cache(1_000)
def plain_name(tool: str) -> str:
    """Return the name of a tool in lower case, without the name of its MCP server or namespace."""
    return tool.rsplit("__", 1)[-1].rsplit(".", 1)[-1].lower().replace("-", "_")


def _access(tool: str, fields: Mapping[str, Any]) -> Access:
    if tool in _READING or (tool in _WRITING and fields.get("command") in _VIEWING_COMMANDS):
        return "read"
    return "written" if tool in _WRITING else "file"


def _values(fields: Mapping[str, Any]) -> Iterator[Any]:
    yield from (fields[key] for key in _KEYS if key in fields)
    for listed in (fields[key] for key in _LISTS if key in fields):
        for item in listed if isinstance(listed, list) else ():
            yield item.get("path") if isinstance(item, dict) else item


Source = Literal["call", "said", "result"]
"""The place of a text: the arguments of a call, a message of the user or the assistant, or a result."""


class Mention(msgspec.Struct, array_like=True, gc=False):
    """How a conversation mentions a name.

    ``count`` is the number of occurrences. ``texts`` is the number of texts with the name, ``calls`` that of calls, and
    ``said`` that of messages by the user or the assistant. ``last`` is the position of the last message with it.
    """

    kind: str
    count: int = 0
    texts: int = 0
    calls: int = 0
    said: int = 0
    last: int = 0


Names = dict[str, Mention]
"""Names by spelling, with their mentions."""

MOST = 3_000
"""Names that are remembered: far more than fit in any prompt."""

PIECE = 16_384
"""Characters per search. A search takes less than 1 ms, and no other thread runs meanwhile."""

SHORTEST_NUMBER = 5
"""Digits. Shorter numbers are mostly those of lines."""

LONGEST_NUMBER = 20

SHORTEST, LONGEST = 3, 300
"""Characters of words that may be names. A longer one counts as several words."""

# A class of characters takes half of the time of "\w". It has the letters and digits of the Basic Multilingual Plane.
_WORD = re.compile(
    "[A-Za-z0-9_./$@~#+\\-\xaa\xb5\xba\xc0-\u1fff\u2c00-\u2fff\u3040-\ud7ff\uf900-\ufdff\ufe70-\uffef]{3,300}"
)
_SPACED = "".join(character if _WORD.fullmatch(3 * character) else " " for character in map(chr, range(128)))
# URLs and amounts have characters that end a word.
_LONG = re.compile(r"https?://[^\s\"'<>()\[\]{}\\`|]{4,300}|[$€£¥] ?\d[\d,.]{0,20}\d")

_EXTENSIONS = (
    "bash|bat|c|cc|cfg|clj|cpp|cs|css|csv|cts|cxx|dart|db|diff|docx|ejs|env|ex|exs|go|gradle|graphql|h|hpp|hs|"
    "html|ini|ipynb|java|jpeg|jpg|js|json|jsonl|jsx|kt|kts|less|lock|log|lua|m|md|mdc|mdx|mjs|mk|mod|mts|nix|"
    "pdf|php|pl|png|prisma|proto|ps1|py|pyi|r|rb|rs|rst|sass|scala|scss|sh|snap|sql|sqlite|sum|svelte|svg|"
    "swift|tex|tf|toml|ts|tsv|tsx|txt|vue|wasm|webp|xlsx|xml|yaml|yml|zig|zip|zsh"
)

_ENDINGS = frozenset(_EXTENSIONS.split("|"))

# Every alternative is matched as a whole, and lengths are bounded, so a word takes linear time.
_WITH_DIGIT = re.compile(
    r"""
    (?P<error>(?:(?:ERR|ERROR|HTTP|STATUS|UTF|ISO|SHA|RFC)-?|E|TS|CS)\d{1,5})
  | (?P<ticket>[A-Z][A-Z0-9]{1,9}-\d{1,10}|\#\d{2,9})
  | (?P<uuid>[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})
  | (?P<date>\d{4}-\d\d-\d\d(?:T[\d.+-]{0,12}Z?)?)
  | (?P<version>v?\d{1,5}\.\d{1,5}\.\d[\w.+-]{0,40})
  | (?P<code>\#?(?=[A-Z0-9-]{0,19}[A-Z])(?=[A-Z0-9-]{0,19}\d)(?=[A-Z0-9-]{5})
      [A-Z0-9]{1,12}(?:-[A-Z0-9]{2,12}){0,3})
  | (?P<hash>(?=[0-9a-f]{0,15}\d)(?=[0-9a-f]{0,15}[a-f])[0-9a-f]{7,64})
  | (?P<number>\d{5,20}|\d{1,9}\.\d\d)
    """,
    re.VERBOSE,
)
_WITHOUT_DIGIT = re.compile(
    rf"""
    (?P<flag>--[A-Za-z][\w-]{{1,40}})
  | (?P<email>[\w.+-]{{1,64}}@[\w-]{{1,63}}(?:\.[\w-]{{1,63}}){{1,4}})
  | (?P<path>(?:~|\.{{1,2}})?/?[\w.@+$-]{{1,100}}(?:/[\w.@+$-]{{1,100}}){{1,30}})
  | (?P<file>[\w+-]{{1,80}}(?:\.[\w+-]{{1,40}}){{0,3}}\.(?:{_EXTENSIONS}))
    """,
    re.VERBOSE,
)
_DIGIT = re.compile(r"\d")
_SPACE = re.compile(r"\s")
# Words of code: lower and upper case in one word, or parts joined by underscores.
_PARTS = re.compile(r"\w{4,100}")
_CODE = re.compile(r"[a-z][a-z0-9]*[A-Z]\w+|[A-Z][a-z0-9]+[A-Z]\w*|_*[A-Za-z0-9]+_\w+|[A-Z]{2,}[a-z]\w+")
_PROPER = re.compile(r"[A-Z][a-z]{2,20}")
_TRAILING = ".-/~+@$"

# A path without a file extension must be absolute or start with a dot. Otherwise "and/or" would match.
_FILE = re.compile(r"\.[a-z]\w{0,5}$")

FILES = ("written", "read", "file", "path")
_ROOTED = ("/", "~", "./", "../")
_CURRENCIES = "$€£¥"
_AFTER_URLS = ".,;:!?"


def collect(
    messages: Iterable[Sequence[tuple[Source, str]]],
    earlier: Names | None = None,
    files: Iterable[tuple[Access, str]] = (),
    start: int = 0,
) -> Names:
    """Return the names in the texts of messages, added to those of ``earlier`` messages.

    ``start`` is the position of the first message. ``files`` are from tool calls. A file that was both written and read
    counts as written.
    """
    mentions: dict[str, Mention] = {}
    plain: set[str] = set()
    for position, parts in enumerate(messages, start):
        for source, text in parts:
            is_result = source == "result"
            seen: set[str] = set()
            for piece in _pieces(text):
                # Most words are plain, and not counting them takes a third of the time.
                counts = Counter(filterfalse(plain.__contains__, _words(piece)))
                for word, count in counts.items():
                    mention = mentions.get(word)
                    if mention is None:
                        if _is_plain(word):
                            plain.add(word)
                            continue
                        mention = mentions[word] = Mention("")
                    mention.count += count
                    if word in seen:
                        continue
                    mention.texts += 1
                    mention.last = position
                    if is_result:
                        continue
                    if source == "call":
                        mention.calls += 1
                    else:
                        mention.said += 1
                if len(text) > PIECE:
                    seen.update(counts)
    known = plain | mentions.keys()
    found = {name: msgspec.structs.replace(mention) for name, mention in (earlier or {}).items()}
    for word, mention in mentions.items():
        for kind, name in _classified(word, known):
            total = found.get(name)
            if total is None:
                total = found[name] = Mention(kind)
            total.count += mention.count
            total.texts += mention.texts
            total.calls += mention.calls
            total.said += mention.said
            total.last = max(total.last, mention.last)
    for access, file in files:
        mention = found.setdefault(file, Mention(access, 1, 1, 1, 0, start))
        if mention.kind not in _ACCESSES or _ACCESSES.index(access) < _ACCESSES.index(mention.kind):
            mention.kind = access
    if len(found) > MOST:
        found = {name: found[name] for name in _likeliest(found, MOST)}
    return found


def argument_text(arguments: Any) -> str:
    """Return the strings in the ``parsed`` arguments of a call."""
    strings: list[str] = []
    waiting = [arguments]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            strings += value
            waiting += reversed(value.values())
        elif isinstance(value, list):
            waiting += reversed(value)
        elif value is not None and not isinstance(value, bool):
            strings.append(str(value))
    return "\n".join(strings)


def _is_plain(word: str) -> bool:
    """Return whether a word is certainly not a name, as most words."""
    return (word.islower() and word.isalpha()) or len(word) < SHORTEST


def _words(piece: str) -> list[str]:
    """Return the words of a piece, in order, with some that are too short."""
    if "\\" in piece and '"' in piece:  # the escapes of JSON would become a part of words
        piece = piece.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")
    words = _split_ascii(piece) if piece.isascii() else None
    if words is None:
        # Slower than one call for all words, which would block all threads for milliseconds.
        words = [match.group() for match in _WORD.finditer(piece)]
    if "://" in piece or any(map(piece.__contains__, _CURRENCIES)):
        words += _LONG.findall(piece)
    return words


def _split_ascii(piece: str) -> list[str] | None:
    """Return the words of a piece in ASCII like ``_WORD``, in a third of the time; ``None`` if one may be too long."""
    spaced = piece.translate(_SPACED)
    place = 0
    while len(spaced) - place > LONGEST:
        space = spaced.rfind(" ", place, place + LONGEST + 1)
        if space < 0:
            return None
        place = space + 1
    return spaced.split()


def _classified(word: str, known: Set[str]) -> Sequence[tuple[str, str]]:
    """Return the names in a word, each with its kind. ``known`` has all words, also those in lower case."""
    if word.isidentifier() or word.isalnum():
        return _of_part(word, known)
    if "://" in word:
        return (("url", word.rstrip(_AFTER_URLS)),)
    if word[0] in _CURRENCIES and word[-1].isdigit():
        return (("amount", word),)
    word = word.rstrip(_TRAILING)
    if not word.startswith(("--", "./", "../")):
        word = word.lstrip("+.-")
    if word.isidentifier() or word.isalnum():
        return _of_part(word, known)
    kind = _kind(word)
    if kind and (kind != "path" or word.startswith(_ROOTED) or _FILE.search(word)):
        return ((kind, word),)
    return [found for part in _PARTS.findall(word) for found in _of_part(part, known)]


def _of_part(part: str, known: Set[str]) -> Sequence[tuple[str, str]]:
    """Return a word of letters, digits, and underscores if it's a name, with its kind."""
    # These checks are faster than the expressions, and most words need no more.
    letters = part.isalpha()
    if letters:
        if part.islower() or part.isupper():
            return ()
        if part.istitle():
            return (("proper", part),) if part.lower() not in known and _PROPER.fullmatch(part) else ()
    elif part.isdecimal():
        return (("number", part),) if SHORTEST_NUMBER <= len(part) <= LONGEST_NUMBER else ()
    if _CODE.fullmatch(part):
        return (("name", part),)
    match = None if letters or not _DIGIT.search(part) else _WITH_DIGIT.fullmatch(part)
    return ((str(match.lastgroup), part),) if match else ()


def _kind(word: str) -> str | None:
    """Return the kind of a word by its form; ``None`` if it's none of them."""
    match = _WITH_DIGIT.fullmatch(word) if _DIGIT.search(word) else None
    # The search takes much longer than this check, and most words are none of them.
    if match is None and ("/" in word or "@" in word or word.startswith("--") or word.rpartition(".")[2] in _ENDINGS):
        match = _WITHOUT_DIGIT.fullmatch(word)
    return match and match.lastgroup


def _pieces(text: str) -> Iterator[str]:
    """Split a text between words, so that no name is cut. Words longer than a piece are cut anyway."""
    start = 0
    while len(text) - start > PIECE:
        reach = start + PIECE
        end = max(text.rfind(" ", start + 1, reach), text.rfind("\n", start + 1, reach))
        if end < 0:
            end = reach
        yield text[start:end]
        start = end
    yield text[start:]


def search_in(text: str) -> Callable[[str], bool]:
    """Return a function that returns whether a text has a name. For many names it's faster than ``in``.

    A name without white space is in a text if it's in one of the words. Most words occur many times.
    """
    words = {word for piece in _pieces_between_words(text) for word in piece.split()}
    distinct = "\n".join(words)

    def is_in(name: str) -> bool:
        if name in words:
            return True
        searched = distinct if name.split() == [name] else text
        starts = range(0, max(1, len(searched)), SEARCHED)
        return any(searched.find(name, at, at + SEARCHED + len(name)) >= 0 for at in starts)

    return is_in


def _pieces_between_words(text: str) -> Iterator[str]:
    """Split a text at white space, so that no word is cut."""
    start = 0
    end = PIECE
    while end < len(text):
        space = _SPACE.search(text, end, end + SEARCHED)
        if space is None:
            end += SEARCHED
            continue
        yield text[start : space.start()]
        start = space.end()
        end = start + PIECE
    yield text[start:]


# How much likelier a kind is needed again than a word of code with the same mentions.
_PRIOR = {
    "written": 3.0,
    "read": 3.0,
    "ticket": 3.0,
    "code": 3.0,
    "file": 0.5,
    "url": 0.5,
    "date": -1.0,
    "version": -1.0,
    "flag": -1.0,
    "error": -2.0,
    "proper": -3.5,
}


def ranking(found: Names) -> list[str]:
    """Return the names by the chance of being needed again, the likeliest first.

    The weights are for the names that coding agents used in the 40 calls after a checkpoint. They are flat around these
    values: doubling one of them moves the share of names found by three percentage points at most.
    """
    return sorted(sorted(found), key=_weigh(found))


def _likeliest(found: Names, most: int) -> list[str]:
    """Return the first names of ``ranking``. Sorting a hundred thousand names at once would block other threads."""
    weights = dict(zip(found, map(_weigh(found), found), strict=True))
    limit = nsmallest(most, weights.values())[-1]
    better = sorted(name for name, weight in weights.items() if weight < limit)
    equal = (name for name, weight in weights.items() if weight == limit)
    return [*sorted(better, key=weights.__getitem__), *nsmallest(most - len(better), equal)]


def _weigh(found: Names) -> Callable[[str], float]:
    """Return a function that returns a smaller number for a name that's likelier needed again."""
    end = max((mention.last for mention in found.values()), default=0) or 1
    log = math.log1p

    def weigh(name: str) -> float:
        mention = found[name]
        kind = mention.kind
        score = (
            2 * log(mention.said)
            + 3 * log(mention.calls)
            + 1.5 * log(mention.texts)
            + log(mention.count)
            + 0.5 * mention.last / end
            - 0.2 * log(len(name) - name.rfind("/") if kind in FILES else len(name))
            + _PRIOR.get(kind, 0.0)
        )
        return -score

    return weigh


MARKS = {"written": " (written)", "read": " (read)"}
"""The kinds that the index lists first, each with its mark behind the folder."""

SMALL = 3
"""The most files of a folder that are listed with those of its parent."""

_FOLDER_TOKENS = 10
"""About the tokens of a folder's line. The exact size is known when the lines are written."""

_RARE = ("url", "ticket", "code", "email", "amount")
_WITH_DIGITS = ("name", *FILES)
_DIGITS = re.compile(r"\d{3}")

_ROUNDS = 3
"""Times that names are chosen, with more tokens if the list became shorter than expected."""

_NAME_TOKENS = 6
"""About the tokens of a name that is taken off a list that became too long."""


def index(found: Names, shown: str, max_tokens: int, count: TextCounter) -> str:
    """List the likeliest names that ``shown`` doesn't contain, in at most ``max_tokens`` tokens.

    Files are listed by folder. Those that calls wrote or read come first, each kind with its mark.
    """
    found = _folded(found)
    names = ranking(found)
    rare = [name for name in names if _is_rare(name, found[name])]
    # Each round asks for the same names again.
    is_shown, size = cache(search_in(shown)), cache(count)
    room = max_tokens
    for _ in range(_ROUNDS):
        first = _chosen(rare, found, is_shown, int(room * keeps.RARE_PART), size)
        chosen = _chosen([*first, *names], found, is_shown, room, size)
        lines = "\n".join(_lines(chosen, found))
        left = max_tokens - count(lines)
        if left <= max_tokens // 8 or len(chosen) == len(names):
            break
        # Files that share a line took less than expected.
        room += left
    while left < 0 and chosen:
        del chosen[-(1 - left // _NAME_TOKENS) :]
        lines = "\n".join(_lines(chosen, found))
        left = max_tokens - count(lines)
    return lines if chosen else ""


def _is_rare(name: str, mention: Mention) -> bool:
    """Return whether a model can't guess a name from others like it."""
    return mention.kind in _RARE or (mention.kind in _WITH_DIGITS and _DIGITS.search(name) is not None)


def _chosen(
    names: Sequence[str], found: Names, is_shown: Callable[[str], bool], left: int, count: TextCounter
) -> list[str]:
    """Return the first names that aren't shown, in about ``left`` tokens."""
    chosen: list[str] = []
    folders: set[tuple[str, str]] = set()
    listed = ""
    for name in names:
        if left < 2:
            break
        if is_shown(name):
            continue
        kind, text, cost = found[name].kind, name, 0
        if kind in FILES:
            folder, text = _split(name)
            if (folder, kind) not in folders:
                cost = _FOLDER_TOKENS
        cost += count(f" {text}")
        if cost > left or name in listed:
            continue
        if kind in FILES:
            folders.add((folder, kind))
        left -= cost
        listed = f"{listed} {text}"
        chosen.append(name)
    return chosen


def _folded(found: Names) -> Names:
    """Return the names with each relative path added to a longer path that ends with it."""
    files = sorted((name for name in found if found[name].kind in FILES), key=lambda name: (len(name), name))
    by_ending: dict[str, str] = {}
    longer: dict[str, str] = {}
    for name in reversed(files):
        if (ending := f"/{name.lstrip('./')}") in by_ending:
            longer[name] = by_ending[ending]
        by_ending |= {name[at:]: name for at, character in enumerate(name) if character == "/"}
    folded = dict(found)
    for short in files:
        if short in longer:
            folded[longer[short]] = _sum(folded.pop(short), folded[longer[short]])
    return folded


def _sum(one: Mention, other: Mention) -> Mention:
    return Mention(
        min(one.kind, other.kind, key=FILES.index),
        one.count + other.count,
        one.texts + other.texts,
        one.calls + other.calls,
        one.said + other.said,
        max(one.last, other.last),
    )


def _lines(chosen: Sequence[str], found: Names) -> list[str]:
    files = [name for name in chosen if found[name].kind in FILES]
    lines: list[str] = []
    while root := _root(files):
        inside = {name: name[len(root) :] for name in files if name.startswith(root)}
        lines += [f"- in {root}:", *(f"  {line}" for line in _marked(inside, found))]
        files = [name for name in files if name not in inside]
    lines += _marked({name: name for name in files}, found)
    rest = [name for name in chosen if found[name].kind not in FILES]
    return [*lines, f"- {' '.join(rest)}"] if rest else lines


def _marked(paths: Mapping[str, str], found: Names) -> list[str]:
    """Return the lines of files. Their paths are by their names, and may be relative to a line before."""
    lines = []
    for kinds in (("written",), ("read",), ("file", "path")):
        lines += _by_folder(
            [path for name, path in paths.items() if found[name].kind in kinds], MARKS.get(kinds[0], "")
        )
    return lines


def _root(files: Sequence[str]) -> str:
    """Return the folder that saves the most characters if it's named once, with a slash at its end; empty for none."""
    lines = {f"{_split(file)[0]}/" for file in files}
    below = Counter(line[: place + 1] for line in lines for place, c in enumerate(line) if c == "/" and place)
    # The root takes a line of its own, and the lines below are indented.
    savings = {folder: (number - 1) * len(folder) - 4 * number - 8 for folder, number in below.items()}
    best = max(sorted(savings), key=savings.__getitem__, default="")
    return best if best and savings[best] > _LEAST_SAVING else ""


_LEAST_SAVING = 20
"""Characters that naming a folder once must save."""


def _split(path: str) -> tuple[str, str]:
    """Return the folder and the name of a file. A name with spaces is quoted, because spaces separate names."""
    folder, separator, name = path.rpartition("/")
    return folder if separator else ".", f'"{name}"' if " " in name else name


def _by_folder(paths: Sequence[str], mark: str) -> list[str]:
    """Return a line per folder. Several small folders share the line of their parent."""
    sizes = Counter(_split(path)[0] for path in paths)
    small = Counter(folder.rpartition("/")[0] for folder, size in sizes.items() if size <= SMALL)
    shared = {parent for parent, folders in small.items() if parent and (parent in sizes or folders > 1)}
    lines: dict[str, list[str]] = {}
    for path in paths:
        folder, name = _split(path)
        parent, _, last = folder.rpartition("/")
        if sizes[folder] <= SMALL and parent in shared and folder not in shared:
            folder, name = parent, f"{last}/{name}"
        lines.setdefault(folder, []).append(name)
    return [f"- {folder}/{mark}: {' '.join(names)}" for folder, names in lines.items()]


_ACCESSES: tuple[Access, ...] = ("written", "read", "file")
