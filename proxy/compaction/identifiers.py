"""Collect the names in texts, and rank them by the chance that they are needed again.

Names are files, URLs, identifiers of code, ids, amounts, and dates. Summaries tend to lose them, and agents need them
to continue.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from heapq import nsmallest
from itertools import filterfalse
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from proxy.compaction import keeps
from proxy.compaction.named_files import Access, portable
from proxy.compaction.pieces import SEARCHED, pause, pieces

Source = Literal["call", "said", "result"]
"""The place of a text: the arguments of a call, a message of the user or the assistant, or a result."""


class SourceText(NamedTuple):
    """A text of a message. ``file`` is the file whose content it is; empty if there is none or more than one."""

    source: Source
    text: str
    file: str = ""


class Mention(msgspec.Struct, array_like=True, gc=False):
    """How a conversation mentions a name.

    ``count`` is the number of occurrences. ``texts`` is the number of texts with the name, ``calls`` that of calls, and
    ``said`` that of messages by the user or the assistant. ``last`` is the position of the last message with it.
    ``file`` is the file to which the name belongs, and ``weight`` how much speaks for it. The ``weight`` of a file that
    a call wrote is the position of the last write.
    """

    kind: str
    count: int = 0
    texts: int = 0
    calls: int = 0
    said: int = 0
    last: int = 0
    file: str = ""
    weight: int = 0


Names = dict[str, Mention]  # names by spelling, with their mentions
MOST = 3_000  # names that are remembered: far more than fit in any prompt
PIECE = 16_384  # Characters per search. A search takes less than 1 ms, and no other thread runs meanwhile.
SHORTEST_NUMBER = 5  # Digits. Shorter numbers are mostly those of lines.

LONGEST_NUMBER = 20

DATE = 10  # characters of a date without its time
SHORTEST, LONGEST = 3, 300  # Characters of words that may be names. A longer one counts as several words.

# A class of characters takes half of the time of "\w". It has the letters and digits of the Basic Multilingual Plane.
_WORD = re.compile(
    "[A-Za-z0-9_./$@~#+\\-\xaa\xb5\xba\xc0-\u1fff\u2c00-\u2fff\u3040-\ud7ff\uf900-\ufdff\ufe70-\uffef]{3,300}"
)
_SPACED = "".join(character if _WORD.fullmatch(3 * character) else " " for character in map(chr, range(128)))
# URLs and amounts have characters that end a word.
_LONG = re.compile(r"https?://[^\s\"'<>()\[\]{}\\`|]{4,300}|[$€£¥] ?\d[\d,.]{0,20}\d")

_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")

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
  | (?P<code>(?!\d+(?:T\d+|T\d+Z|Z|[KMGT]B)$)\#?(?=[A-Z0-9-]{0,19}[A-Z])(?=[A-Z0-9-]{0,19}\d)(?=[A-Z0-9-]{5})
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
_TRAILING = ".-/~+@$"

# The first name of a line that isn't indented, begins with one to four plain words, and goes on with parameters, a
# type, or a value. Indented lines are more often uses, such as "return loadTable(".
_DEFINITION = re.compile(
    r"\n(?: {0,6}\d{1,6}+[ \t]{0,2}[\u2192:|\t] ?)?+(?:[a-z]{2,12}+ ){1,4}+"
    r"(?:\([\w* ]{1,40}+\) ?)?+([A-Za-z_]\w{3,60}+) {0,2}+(?=[(:={<\[a-z*])"
)

# A capitalized word, unless it begins a sentence.
_CAPITALIZED = re.compile(r"[A-Z](?<=[a-z,] [A-Z])[a-z]{2,20}\b")
_VALUE = re.compile(r'": ?"((?:[A-Z][a-z]{2,20}\b ?){1,4})"')
SHORT_ARGUMENTS = 500  # Characters. The prose in longer arguments is a file's content.
LONGEST_BEFORE = 24  # characters of the word before a capitalized one

_HIDDEN = re.compile(r"\.[A-Za-z][\w-]{0,60}/")
_SYSTEM = ("/dev/", "/proc/", "/bin/", "/sbin/", "/usr/bin/", "/usr/sbin/", "/usr/local/bin/")
_MEMBERS = ("console.log", "process.env")  # members of objects that look like files

# A path without a file extension must be absolute or start with a dot. Otherwise "and/or" would match.
_FILE = re.compile(r"\.[a-z]\w{0,5}$")

_ACCESSES: tuple[Access, ...] = ("written", "read", "file")
FILES = (*_ACCESSES, "path")
_ROOTED = ("/", "~", "./", "../")
_CURRENCIES = "$€£¥"
_AFTER_URLS = ".,;:!?"


def collect(
    messages: Iterable[Sequence[SourceText]],
    earlier: Names | None = None,
    files: Iterable[tuple[Access, str, int]] = (),
    start: int = 0,
    parameters: Set[str] = frozenset(),
) -> Names:
    """Return the names in the texts of messages, added to those of ``earlier`` messages.

    ``start`` is the position of the first message. ``files`` are from tool calls, each with the position of its
    message. A file that was both written and read counts as written. ``parameters`` aren't names, because the model
    has them in its tools.
    """
    words = _Words(parameters)
    for position, parts in enumerate(messages, start):
        for part in parts:
            words.add(part, position)
    found = {name: replace(mention) for name, mention in (earlier or {}).items() if name not in parameters}
    words.add_names(found)
    for access, file, position in files:
        mention = found.setdefault(portable(file), Mention(access, 1, 1, 1, 0, position))
        if access == "written":
            mention.weight = position
        if mention.kind not in _ACCESSES or _ACCESSES.index(access) < _ACCESSES.index(mention.kind):
            mention.kind = access
    if len(found) > MOST:
        found = {name: found[name] for name in _likeliest(found, MOST)}
    return found


class _Words:
    """The words of texts, with the mentions of those that may have names."""

    def __init__(self, parameters: Set[str]) -> None:
        """Take words that aren't names."""
        self._mentions: dict[str, Mention] = {}
        self._parameters = parameters
        self._plain: set[str] = set(parameters)
        self._proper: set[str] = set()

    def add(self, part: SourceText, position: int) -> None:
        """Count the words of a text."""
        source, text, file = part
        mentions, plain = self._mentions, self._plain
        self._proper.update(_proper(source, text))
        factor = 0 if not file else keeps.READ_WEIGHT if source == "result" else keeps.WRITTEN_WEIGHT
        defined = set[str]()  # the names that a file probably defines
        for piece in _pieces(f"\n{text}") if factor else ():
            defined |= {match[1] for match in _DEFINITION.finditer(piece)}
        seen: set[str] = set()
        for piece in _pieces(text):
            pause()
            # Most words are plain, and not counting them takes a third of the time.
            counts = Counter(filterfalse(plain.__contains__, _words(piece)))
            for word, count in counts.items():
                mention = mentions.get(word)
                if mention is None:
                    if (word.islower() and word.isalpha()) or len(word) < SHORTEST:  # most words
                        plain.add(word)
                        continue
                    mention = mentions[word] = Mention("")
                mention.count += count
                if factor:
                    weight = factor * (count + (keeps.DEFINED_WEIGHT if word in defined else 0))
                    if weight >= mention.weight:
                        mention.file, mention.weight = file, weight
                if word in seen:
                    continue
                mention.texts += 1
                mention.last = position
                if source == "call":
                    mention.calls += 1
                elif source == "said":
                    mention.said += 1
            if len(text) > PIECE:
                seen.update(counts)

    def add_names(self, found: Names) -> None:
        """Add the names in the words to those that were found."""
        known = self._plain | self._mentions.keys()
        for word, mention in self._mentions.items():
            pause()
            for kind, name in _classified(word, known, mention, self._proper):
                if name in self._parameters:
                    continue
                total = found.get(name)
                if total is None:
                    total = found[name] = Mention(kind)
                total.count += mention.count
                total.texts += mention.texts
                total.calls += mention.calls
                total.said += mention.said
                total.last = max(total.last, mention.last)
                if mention.weight >= total.weight and kind not in FILES:
                    total.file, total.weight = mention.file, mention.weight


def is_program(text: str) -> bool:
    """Return whether a text defines a name with parameters, a type, or a value. In prose, a word or a colon follows."""
    return any(
        match.string[match.end()] in "(={<[*" for piece in _pieces(f"\n{text}") for match in _DEFINITION.finditer(piece)
    )


def _proper(source: Source, text: str) -> Iterator[str]:
    """Yield the capitalized words that don't only begin a sentence: those in prose, and the values of JSON."""
    if source == "result":
        if text.startswith(("{", "[")):
            yield from (word for piece in _pieces(text) for match in _VALUE.findall(piece) for word in match.split())
        return
    if source == "call" and len(text) > SHORT_ARGUMENTS:
        return
    for piece in _pieces(text):
        end = -1
        for match in _CAPITALIZED.finditer(piece):
            start = match.start()
            before = piece[max(0, start - LONGEST_BEFORE) : start - 1].rpartition(" ")[2]
            if start == end + 1 or before[:1].islower():
                end = match.end()
                yield match[0]


def _words(piece: str) -> list[str]:
    """Return the words of a piece, in order, with some that are too short."""
    if ":\\" in piece:
        piece = portable(piece, in_prose=True)
    if "\\" in piece and '"' in piece:  # the escapes of JSON would become a part of words
        piece = piece.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")
        piece = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), piece)
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


def _classified(word: str, known: Set[str], mention: Mention, proper: Set[str]) -> Sequence[tuple[str, str]]:
    """Return the names in a word, each with its kind. ``known`` has all words, also those in lower case."""
    if word.isidentifier() or word.isalnum():
        return _of_part(word, known, proper)
    if "://" in word:
        return (("url", word.rstrip(_AFTER_URLS)),)
    if word[0] in _CURRENCIES and word[-1].isdigit():
        return (("amount", word),)
    word = word.rstrip(_TRAILING)
    if not word.startswith(("--", "./", "../")):
        word = word.lstrip("+-" if _HIDDEN.match(word) else "+.-")
    if word.isidentifier() or word.isalnum():
        return _of_part(word, known, proper)
    kind = _kind(word)
    if kind == "path":
        path = _path(word, mention)
        if path is not None:
            return (("path", path),) if path else ()
    elif kind == "date":
        return (("date", word[:DATE]),)
    elif kind:
        return () if word in _MEMBERS else ((kind, word),)
    return [found for part in _PARTS.findall(word) for found in _of_part(part, known, proper)]


def _path(word: str, mention: Mention) -> str | None:
    """Return the path in a word; empty if it isn't worth a place, and ``None`` if the word isn't a path.

    A path relative to the file that has it, such as an import, is left out, and so is one without an extension that
    only results have, because it's a route or a folder of the system.
    """
    is_used, is_file = mention.calls or mention.said, _FILE.search(word) is not None
    if word.startswith(("./", "../")):
        return word.removeprefix("./") if is_used and mention.file in ("", word) else ""
    if not is_file and not word.startswith(_ROOTED):
        return None
    return "" if word.startswith(_SYSTEM) or not (is_used or is_file) else word


def _of_part(part: str, known: Set[str], proper: Set[str]) -> Sequence[tuple[str, str]]:
    """Return a word of letters, digits, and underscores if it's a name, with its kind."""
    # These checks are faster than the expressions, and most words need no more.
    letters = part.isalpha()
    if letters:
        if part.islower() or part.isupper():
            return ()
        if part.istitle():
            return (("proper", part),) if part in proper and part.lower() not in known else ()
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
    words = {word for piece in pieces(text, _SPACE, PIECE) for word in piece.split()}
    distinct = "\n".join(words)

    def is_in(name: str) -> bool:
        if name in words:
            return True
        searched = distinct if name.split() == [name] else text
        if len(searched) <= SEARCHED:
            return name in searched
        starts = range(0, max(1, len(searched)), SEARCHED)
        return any(searched.find(name, at, at + SEARCHED + len(name)) >= 0 for at in starts)

    return is_in


# How much likelier a kind is needed again than a word of code with the same mentions.
_PRIOR = {
    "written": 4.0,
    "read": 4.0,
    "ticket": 3.0,
    "code": 3.0,
    "file": 1.4,
    "path": 0.9,
    "url": -0.5,
    "date": -1.0,
    "hash": -1.0,
    "version": -1.0,
    "number": -1.5,
    "error": -2.0,
    "flag": -2.5,
    "proper": -3.5,
}
_WORD_OF_FILE, _FIGURE_OF_FILE = 1.0, -3.0
"""The same for a word of code that belongs to a file, and for a figure such as a number or a URL, which can be read
again in the file."""
_FOLDER = -2.0  # the same for a path without an extension


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
        pause()
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
        if mention.file:
            score += _WORD_OF_FILE if kind == "name" else _FIGURE_OF_FILE
        elif kind == "path" and "." not in name[name.rfind("/") :]:
            score += _FOLDER
        return -score

    return weigh
