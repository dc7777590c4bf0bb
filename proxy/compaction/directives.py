"""Find the sentences in a text that state a rule, a limit, a preference, or a correction.

A summary tends to lose them, although they hold for the rest of a conversation. Words that make demands have weights,
so the search also finds rules about unknown subjects. It knows English best. Tables have the words for "never",
"always", "must", "only", "without", and "not" of other languages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

Rule = TypeVar("Rule", bound=Hashable)

LONGEST = 500  # Characters. A longer sentence isn't a rule but a paste.
SHORTEST = 8  # characters of the shortest rule, or bytes: a word of Chinese has few characters
MOST = 262_144  # characters of a text that are searched: half of them from its beginning, half from its end
WRAPPED = 50  # characters of a line that may continue in the next one

_END = re.compile(r"[.!?][\"')\]*_`”]{0,3}\s+")
# The same in any script. Those of Chinese and Japanese need no space after them.
_ANY_END = re.compile(rf"{_END.pattern}|[。！？｡؟۔।॥][\"')\]”’」』）]{{0,3}}\s*")
# Bullets, numbers, quotation marks, and the line numbers that tools add.
_BULLET = re.compile(r"(?:\s{0,12}\d{1,6}(?:→|\t|[:|] ?))?\s{0,40}(?:(?:[-*+•>#]{1,4}|\d{1,3}[.)])\s{1,8}|[*_]{2})?")
_AROUND = ".,;:!?\"'()[]*_`“”"
_SYMBOL = re.compile(r"[^\w\s\u0300-\u036f\u0600-\u06ff\u0900-\u109f]")  # vowel signs aren't symbols
_CODE = re.compile(r"[{};=<>\\]|\)\s{0,4}:|\w\(")

ENOUGH = 9  # the weight from which a sentence counts as a rule

SAID = 4
"""The weight from which a sentence of the user may be one. If there's too little room, heavier ones come first."""

# The weights of words, by meaning. A meaning counts once for each sentence.
_ANYWHERE = (
    (6, "never always must mustn't shall don't forbidden prohibited mandatory required forbid refrain essential"),
    (4, "should shouldn't cannot can't won't avoid prefer preferably rather instead except without unless allowed"),
    (4, "only most least maximum minimum limit limits limited budget deadline exactly until longer further onwards"),
    (4, "important constraint constraints rule rules requirement requirements policy convention conventions guideline"),
    (5, "want need needs hate love dislike allergic expect insist behalf permission approval"),
    (4, "now forward rest circumstances times"),
    (3, "no not nor nothing nobody none over nicht kein keine keinen keiner nichts pas aucun aucune rien ningún "
        "ninguna nada não nem nenhum nenhuma nessun nessuna niente niet geen niets inte ikke nie żadnych не ни никаких "
        "hiç hiçbir tidak không لا لن न नहीं कभी"),
    (2, "every each all any everything anything whatever both"),
    (3, "you your yours i me my mine we us our ours i'm i'd i'll let's you're we're"),
    (3, "reply replies answer answers respond response responses message messages sentence word words paragraph"),
    (3, "language tone format style name names called paragraphs"),
)  # fmt: skip
# "Never", "always", and "must" of other languages; "only", "without", and "please".
_OTHER = (
    (9, "niemals immer stets muss musst müssen darf darfst dürfen verboten unbedingt zwingend ausschließlich jamais "
        "toujours doit dois doivent devez interdit obligatoire nunca jamás siempre debe debes deben prohibido sempre "
        "deve devem devi devono proibido mai vietato nooit altijd moet mogen aldrig alltid måste altid skal nigdy "
        "zawsze musi musisz muszą wolno koniecznie nikdy vždy musíš никогда всегда нельзя обязательно должен должна "
        "должны запрещено ніколи завжди asla mutlaka daima yasak jangan selalu harus đừng luôn يجب ممنوع हमेशा मत"),
    (4, "nur ohne statt außer soll sollst sollte sollten vermeide bitte künftig höchstens seulement uniquement sauf "
        "évite évitez veuillez désormais sólo solamente únicamente evita evite excepto apenas somente sem exceto "
        "soltanto senza tranne mag alleen zonder behalve vanaf bara utan tylko bez unikaj oprócz proszę только лишь "
        "без кроме избегай избегайте впредь yalnızca sadece lütfen hanya tanpa فقط بدون دون केवल सिर्फ बिना चाहिए कृपया"),
)  # fmt: skip
# The same for scripts without spaces, for endings, and for words that English has, too. They're searched only in
# sentences with a character that isn't ASCII. Each alternative begins with a character, because that's faster.
_PARTS = (
    (9, re.compile(
        r"绝对|絕對|绝不|决不|永远|永遠|始终|始終|总是|總是|必须|必須|必需|务必|務必|一定要|不得|不要|不许|不准|禁止|"
        r"严禁|嚴禁|切勿|请勿|請勿|必ず|絶対|常に|いつも|決して|ては(?:いけ|なら)|では(?:いけ|なら)|ないで(?:くだ|下)|"
        r"なければ(?:なら|いけ)|ないこと[。！]?$|すること[。！]?$|るな[。！]?$|うな[。！]?$|すな[。！]?$|반드시|항상|언제나|"
        r"절대|금지|지 ?마|지 말|면 안 ?[되됩돼된]|야 ?(?:합니다|한다|해)|ห้าม|ต้อง|เสมอ|อย่า|دائم|أبدا|أبدً|न \S+ें|"
        r"m[ae](?:y[ıi]n(?:[ıi]z)?)?\.?$|m[ae]l[ıi](?:s[ıi]n|y[ıi]z|d[ıi]r)?\.?$|zorunda|her zaman"
    )),
    (4, re.compile(
        r"只能|只用|只需|仅|僅|未经|未經|除非|避免|应该|應該|应当|从现在|今后|不能|不可(?![用读能见])|だけ|のみ|べき|"
        r"なしに|なしで|今後|없이|오직|않도록|앞으로|من الآن|अब से| (?:sans|sin|solo) |m[ae]d[ae]n |bundan sonra"
    )),
)  # fmt: skip
# An order not to do something: a negation and the form of a verb.
_ORDER = 9
_NEGATIONS = ("ne ", "n'", "n’", "не ", "nie ", "non ", "não ", "لا ")
_ORDERS = re.compile(
    r"ne \w|n['’]\w|не \w+(?:[йиь]|те)\b|nie \w+j(?:cie|my)?\b|non \w+[aei]re\b|não (?:\w+e[ms]?|faça|\w+eva)\b|"
    r"لا ت|(?!(?:[dkms]?eine|diese|jede|alle|heute)\b)\w{3,20}e\b.{1,200}\b(?:nicht|keine?[nmrs]?)\b|"
    r".{0,100}\bnie (?:d[aeiu]\w{1,2}|ein\w{0,2}|im|in|auf|mit|ohne)\b"
)
_SPACES = str.maketrans(dict.fromkeys(".,;:!?\"'()[]*_`“”«»„‚‘’¡¿،؛؟।॥—–", " "))
# Those of the first word of a sentence.
_FIRST = (
    (12, "don't never always only avoid stop no refrain remember ensure nobody nothing"),
    (5, "when whenever before after if unless until while once each every for from at under as"),
    (6, "actually correction instead sorry wait"),
)
_VERB = 6
_VERBS = (
    "add address adopt aim answer apply ask assume attach base begin build call cap check choose cite close "
    "commit compare confirm consider convert copy count cover create default define delete deliver document "
    "double draft drop end escape exclude expect explain export favor favour fetch finish fix focus follow format "
    "generate get give go group handle highlight hold ignore include indent insert install keep label lead leave "
    "let limit link list log look maintain make mark match mention merge move name note offer omit open order "
    "organize output pass pick place preface prefer prefix preserve print produce propose prove provide put quote "
    "read refer reference remove rename repeat replace reply report request resolve respect respond restate "
    "review round run save say select send separate set show sign skip solve sort speak specify spell "
    "split start state stay stick structure suggest summarize switch take talk target tell test translate treat "
    "try turn update use validate verify wait watch work wrap write"
)
_POLITE = ("please", "also", "and", "but", "so", "then", "just", "ok", "okay", "kindly", "again")
_PLEASE = 4
_CLAUSE = 4  # the weight of a demand after a comma, as in "when you are done, tell me"
_HAVE_TO = 5
_QUESTION = 6
_LOOKS_LIKE_CODE = 5
_CHARACTERS_PER_POINT = 100
"""A sentence loses a point for each hundred characters, because long ones have more words of any kind."""

_AFTER_COMMA = {*_VERBS.split(), "not", "never"}
_WEIGHTS = [weight for weight, _ in (*_ANYWHERE, *_OTHER)]
# Words with the usual characters around them are entries of their own, because that's faster than removing them.
_MEANINGS = {
    f"{before}{form}{after}": number
    for number, (_, words) in enumerate((*_ANYWHERE, *_OTHER))
    for word in words.split()
    for form in {word, word.replace("'", "’")}
    for before in ("", "**", "*", "_", '"', "(")
    for after in ("", ".", ",", ":", ";", "!", "?", "**", "*", "_", '"', ")")
}
_AT_START = {word: weight for weight, words in _FIRST for word in words.split()} | dict.fromkeys(_VERBS.split(), _VERB)


def directives(text: str, least: int = SAID) -> dict[str, int]:
    """Return the sentences of a text that may state a rule, in order, with their weights of at least ``least``."""
    if len(text) > MOST:
        text = f"{text[: MOST // 2]}\n{text[-MOST // 2 :]}"
    found: dict[str, int] = {}
    for sentence in _sentences(text):
        weight = _weight(sentence)
        # Logs and data have the same words, but more other characters.
        if weight >= least and len(_SYMBOL.findall(sentence)) <= 0.2 * len(sentence):
            found.setdefault(sentence, weight)
    return found


def _sentences(text: str) -> Iterator[str]:
    for part in _parts(text):
        start = 0
        ends = _END if part.isascii() else _ANY_END
        for end in [*(match.end() for match in ends.finditer(part)), len(part)]:
            sentence = part[start:end]
            start = end
            for piece in sentence.split("\n") if len(sentence) > LONGEST else (sentence,):
                if _long_enough(piece) and (bullet := _BULLET.match(piece)) is not None:
                    rule = piece[bullet.end() :].strip()
                    if _long_enough(rule) and len(rule) <= LONGEST:
                        yield rule


def _parts(text: str) -> list[str]:
    """Return the lines of a text. A long line and those that continue it in lower case are one."""
    parts: list[str] = []
    before = ""
    for line in text.split("\n"):
        if len(before) >= WRAPPED and len(parts[-1]) <= LONGEST and line[:12].lstrip()[:1].islower():
            parts[-1] = f"{parts[-1]}\n{line}"
        elif _long_enough(line):
            parts.append(line)
        before = line
    return parts


def _long_enough(text: str) -> bool:
    return len(text) >= SHORTEST or len(text.encode("utf-8", "surrogatepass")) >= SHORTEST


def _weight(sentence: str) -> int:
    """Return how much a sentence sounds like a demand."""
    lower = sentence.lower()
    words = lower.split()
    weight = _start(words)
    if not lower.isascii():
        words += lower.translate(_SPACES).split()
        weight += sum(heavy for heavy, parts in _PARTS if parts.search(lower))
    if found := _MEANINGS.keys() & words:
        weight += sum(_WEIGHTS[number] for number in {_MEANINGS[word] for word in found})
    negated = lower.startswith(_NEGATIONS) or " nicht" in lower or " kein" in lower or " nie " in lower
    weight += _ORDER if negated and _ORDERS.match(lower) else 0
    if ", " in sentence:
        clauses = [clause.partition(" ")[0] for clause in sentence.split(", ")[1:]]
        weight += 0 if _AFTER_COMMA.isdisjoint(clauses) else _CLAUSE
    weight += _HAVE_TO if "has to " in lower or "have to " in lower else 0
    if weight < SAID:
        return weight
    weight -= len(sentence) // _CHARACTERS_PER_POINT
    weight -= _QUESTION if sentence.endswith(("?", "？", "؟")) else 0
    return weight - (_LOOKS_LIKE_CODE if _CODE.search(sentence) else 0)


def _start(words: list[str]) -> int:
    """Return the weight of a sentence's first words."""
    weight = 0
    for place, word in enumerate(words[:4]):
        word = word.strip(_AROUND).replace("’", "'")
        if word in _POLITE:
            weight = max(weight, _PLEASE if word in ("please", "kindly") else 0)
            continue
        if word == "do" and words[place + 1 : place + 2] == ["not"]:
            word = "don't"
        return weight + _AT_START.get(word, 0)
    return weight


_MISSES = 16  # rules that may be too long before the search for one that fits ends


def heaviest(found: Mapping[Rule, int], most: int, size: Callable[[Rule], int]) -> list[Rule]:
    """Return the rules with the largest weights that fit, in order. ``size`` returns a rule's part of ``most``."""
    chosen = set()
    missed = 0
    for rule in sorted(found, key=lambda rule: -found[rule]):
        taken = size(rule)
        if taken <= most:
            chosen.add(rule)
            most -= taken
        elif (missed := missed + 1) == _MISSES:
            break
    return [rule for rule in found if rule in chosen]


def rule_lines(text: str, characters: int) -> list[str]:
    """Return the rules in a text with the largest weights, at most ``characters`` characters, in order."""
    return heaviest(directives(text), characters, lambda rule: len(rule) + 1) if characters >= SHORTEST else []
