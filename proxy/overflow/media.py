"""Read how many images and files an upstream takes in a request, from its refusal of more.

Past such a limit, an upstream refuses every later request of a conversation, also those with text only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

STATUS = frozenset({200, 400, 413, 422})  # of such refusals. 200 is a stream whose first event is an error.
MANY_IMAGES = 20  # images above which Anthropic takes only smaller ones, by "Vision" in its documentation
DATA = re.compile(rb"[\w+/=-]{1000,}")  # the data of an image in a request

_MANY = re.compile(r"\bpixels\b[^.]{0,60}many[- ]image|many[- ]image\b[^.]{0,60}\bpixels")
_SEVERAL = r"(?:s\b|\(s\)|(?=[ _-](?:items?|inputs?|parts?|blocks?|count|limit|number|pages)\b))"
_COUNTED = {
    "image": re.compile(rf"\b(?:input_)?(?:image|picture|photo|screenshot|image_url){_SEVERAL}|图片|图像"),
    "audio": re.compile(rf"\baudio(?: clip| file)?{_SEVERAL}|音频"),
    "video": re.compile(rf"\bvideo{_SEVERAL}|视频"),
    "file": re.compile(rf"\b(?:document|file|pdf|attachment){_SEVERAL}|文件|文档|附件"),
}
"""The words for several parts of each kind. A single image is refused for another reason."""
_ALL = re.compile(r"\b(?:media|multi-?modal)\b|多媒体")
_OTHER = re.compile(r"\bper (?:second|minute|hour|day|week|month)\b|\b(?:[rt]pm|rate|quota|tokens?)\b|\bdecod|\bfetch")

_NUMBER = re.compile(r"(?<![a-z0-9_.$#/-])\d{1,5}(?![a-z0-9_%/]|[.,:]\d)")
_LIMIT = re.compile(
    r"\b(?:max|limit|allow|support|accept|permit|handle|exceed)|\b(?:at most|up to|only|must (?:be|have|contain))\b"
    r"|\b(?:more|fewer|less|greater) than\b|\bset \w+=$|[<>≤]|最多|最大|上限|限制|超过|超出"
)
_SENT = re.compile(
    r"(?:\b(?:got|given|received|found|contain\w*|ha[sd]|have|sent|passed|provided|requested|by|but)\W{0,3}|[共到入])$"
)
_AFTER = re.compile(
    r"[)\]]{0,4}[ -]?(?:(?:#|items|elements|entries|parts|(?P<pages>pages))[ -]?){0,4}[张个幅)\]]{0,4}\s?"
    r"(?!>|(?:(?:is|are|was|were) )?(?:given|provided|received|sent|found|requested|exceed))"
    r"(?P<limit>(?:(?:is|are) )?(?:the )?(?:max|limit|allow|support|permit)|or (?:fewer|less))?"
    r"(?(limit)|(?:$|[.,;:!?(+=\u3000-\u9fff\uff00-\uffef]|(?:is|are|may|can|per|in|for|at|on|with|and|but|or|got)\b))"
)
"""The words after a number of media. Another unit, or a number that was sent, doesn't match."""
_SENTENCE_END = re.compile(r"[.;!?。；！](?=\s|$)|(?<=[。；！])")


class MediaLimit(NamedTuple):
    """The most media of these kinds in a request. If ``guessed``, the upstream named no such number."""

    kinds: frozenset[str]
    most: int
    guessed: bool = False

    def count(self, kinds: Iterable[str]) -> int:
        return sum(kind in self.kinds for kind in kinds)


def read(text: str, sent: Sequence[str]) -> MediaLimit | None:
    """Read a refusal of a request with media of the kinds ``sent``; ``None`` if it isn't about their number."""
    text = text.lower()
    if _MANY.search(text):
        limit = MediaLimit(frozenset({"image"}), MANY_IMAGES, guessed=True)
        return limit if limit.count(sent) > MANY_IMAGES else None
    sentences = [sentence for sentence in _SENTENCE_END.split(text) if sentence.strip()]
    both = (f"{one}. {two}" for one, two in pairwise(sentences))
    return next((found for sentence in (*sentences, *both) if (found := _sentence(sentence, sent))), None)


def _sentence(text: str, sent: Sequence[str]) -> MediaLimit | None:
    if _OTHER.search(text):
        return None
    kinds = {kind for kind, counted in _COUNTED.items() if _ALL.search(text) or counted.search(text)}
    for counted in (_ALL, *_COUNTED.values()):
        text = counted.sub("#", text)
    limit, start, paged = MediaLimit(frozenset(kinds), 0), 0, False
    count, found = limit.count(sent), []
    for number in _NUMBER.finditer(text) if kinds else ():
        before, start = text[start : number.start()], number.end()
        after = _AFTER.match(text, start)
        paged = paged or (after is not None and after["pages"] is not None)
        if after and not _SENT.search(before) and (after["limit"] or _LIMIT.search(before)):
            found.append(int(number[0]))
    if named := [most for most in found if 0 < most < count and not (paged and kinds == {"file"})]:
        return limit._replace(most=min(named))
    # The upstream counts pages, but the proxy counts files.
    return limit._replace(most=count // 2, guessed=True) if paged and found and count > 1 else None
