"""Count the tokens of images, audio, video, and files in messages.

Their tokens don't depend on their bytes in the request: a 5 MB picture costs its tiles. The proxy reads sizes from the
first bytes and never fetches a URL. If the size isn't known (a URL, a file's id, damaged data), a part counts as the
maximum for its kind.

An image counts by the rule of its model's family, from its size in pixels. The rules are the providers' own, from
OpenAI's guide "Images and vision", Anthropic's "Vision" and Google's "Understand and count tokens". If measured bills
are above the guide, the rule uses the higher figure.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from proxy.errors import ConfigurationError

MEDIA_LABELS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "image_file": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
    "file": "file",
    "input_file": "file",
    "document": "file",
    "document_url": "file",  # Mistral's
}
"""The ``type`` of each media part, with its name in labels.

The types of all APIs are in this one list: ``Media`` counts these parts, and the stages replace them with labels.
"""

# A picture's size is in its first bytes, in a JPEG after metadata of up to 64 KB and a preview.
_HEADER_CHARACTERS = 256 * 1024
# The formats that models accept. imagesize also reads others, such as SVG, whose XML could be an attack.
_MAGIC = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"GIF87a", b"GIF89a", b"RIFF", b"BM")
_ISO_BRANDS = (b"heic", b"heix", b"mif1", b"avif", b"msf1")

# Tokens per second of sound: OpenAI one per 100 ms of input, Google 32 per second.
_SOUND_TOKENS: Mapping[str, int] = {"gemini": 32, "gemini-3": 32}
_SOUND_TOKENS_OTHERS = 10
# The lowest usual bytes per second, so that the estimated length is rather too long than too short. A WAV file states
# its own rate.
_BYTES_PER_SECOND: Mapping[str, int] = {"wav": 32_000, "pcm16": 48_000, "flac": 30_000, "g711": 8_000}
_BYTES_PER_SECOND_OTHERS = 6_000
# OpenAI's limit of 25 MB is about an hour at 64 kbit/s.
_LONGEST_SOUND = 3600.0
# Google samples a frame per second: 258 tokens for the frame, and the sound.
_VIDEO_TOKENS = 300
_VIDEO_BYTES_PER_SECOND = 100_000

# Anthropic states 1,500 to 3,000 tokens per page of a PDF. A page has about 50 KB. Providers accept up to 100 pages.
_PAGE_TOKENS = 2_500
_PAGE_BYTES = 50_000
_MOST_PAGES = 100
# A file given by its id counts as a report of ten pages.
_UNSEEN_FILE = 10 * _PAGE_TOKENS

# An answer's audio, given by its id, counts as two minutes.
SPOKEN_ANSWER = 120 * _SOUND_TOKENS_OTHERS

# Searching for the key first is seven times as fast as searching for each value. Most messages don't even have it.
_REMOTE = (
    (b'"type"', re.compile(rb'"type"\s*:\s*"(?:%s)"' % "|".join(MEDIA_LABELS).encode())),
    (b'"audio"', re.compile(rb'"audio"\s*:\s*\{')),
)
_BORDER = re.compile(rb'[^"a-z_\s:{]')
_SEARCHED = 65_536  # bytes per search


def has_remote_media(raw: bytes) -> bool:
    """Return whether the JSON may contain parts whose tokens can exceed their bytes.

    Searches for the types of such parts (1 ms per MB). If there are none, ``Counter`` counts at most one token per byte
    of ``raw``. Text inside strings never matches, because strings escape quotation marks.
    """
    raw, start = bytes(raw), 0  # an undecoded message has no ``find``
    while True:
        # In pieces, because no other thread runs during a search. No match goes beyond the border of a piece.
        end = len(raw) if len(raw) - start <= _SEARCHED else _border(raw, start + _SEARCHED)
        if any((at := raw.find(key, start, end)) >= 0 and part.search(raw, at, end) for key, part in _REMOTE):
            return True
        if end == len(raw):
            return False
        start = end


def _border(raw: bytes, start: int) -> int:
    """Return the first place from ``start`` on that isn't within a match."""
    while start < len(raw):
        border = _BORDER.search(raw, start, start + _SEARCHED)
        if border is not None:
            return border.start()
        start += _SEARCHED
    return len(raw)


class _Data(NamedTuple):
    """Base64 data in a request: its media type, and the text from ``start``."""

    mime: str
    text: str
    start: int

    @property
    def length(self) -> int:
        return (len(self.text) - self.start) * 3 // 4

    def head(self) -> bytes:
        """Return the first bytes; empty if the text isn't base64."""
        text = self.text[self.start : self.start + _HEADER_CHARACTERS]
        if any(space in text for space in "\r\n\t "):
            text = "".join(text.split())
        try:
            return base64.b64decode(text[: len(text) // 4 * 4] or text + "===", validate=False)
        except (binascii.Error, ValueError):
            return b""

    def decoded(self) -> str:
        """Return the data as text; the base64 itself if it isn't valid."""
        try:
            return base64.b64decode(self.text[self.start :] + "==").decode("utf-8", "replace")
        except (binascii.Error, ValueError):
            return self.text[self.start :]


class Media:
    """Counts media by the rules of one family (a name of ``images.RULES``)."""

    def __init__(self, family: str) -> None:
        self._image = image_rule(family)
        self._sound = _SOUND_TOKENS.get(family, _SOUND_TOKENS_OTHERS)

    def tokens(self, kind: str, part: Mapping[str, Any], text: Callable[[str], int]) -> int:
        """Return the tokens of a content part with the type ``kind``, one of ``MEDIA``. ``text`` counts text."""
        return MEDIA[kind](self, part.get(kind, part), part, text)

    def image(self, value: object, part: Mapping[str, Any], text: Callable[[str], int]) -> int:
        source, detail = _address(value, part), _detail(value, part)
        data = _data(source)
        size = _size(data.head()) if data else None
        return self._image.tokens(size, detail)

    def sound(self, value: object, part: Mapping[str, Any], text: Callable[[str], int]) -> int:
        data = _data(_address(value, part))
        seconds = _LONGEST_SOUND
        if data:
            form = value.get("format") if isinstance(value, Mapping) else None
            seconds = min(seconds, data.length / _sound_rate(data, form if isinstance(form, str) else ""))
        return math.ceil(seconds * self._sound) + 1

    def video(self, value: object, part: Mapping[str, Any], text: Callable[[str], int]) -> int:
        data = _data(_address(value, part))
        seconds = min(_LONGEST_SOUND, data.length / _VIDEO_BYTES_PER_SECOND) if data else _LONGEST_SOUND / 60
        return math.ceil(seconds + 1) * _VIDEO_TOKENS

    def file(self, value: object, part: Mapping[str, Any], text: Callable[[str], int]) -> int:
        plain = _plain_text(value, part)
        data = None if plain is not None else _data(_address(value, part))
        name = value.get("filename") if isinstance(value, Mapping) else None
        named = text(name[:1000]) if isinstance(name, str) else 0
        if data is None:
            return named + (text(plain) if plain is not None else _UNSEEN_FILE)
        if data.mime.startswith("image/"):
            return named + self.image(value, part, text)
        if data.mime.startswith("text/"):
            return named + text(data.decoded())
        return named + min(_MOST_PAGES, math.ceil(data.length / _PAGE_BYTES) or 1) * _PAGE_TOKENS


_COUNTS: Mapping[str, Callable[[Media, object, Mapping[str, Any], Callable[[str], int]], int]] = {
    "image": Media.image,
    "audio": Media.sound,
    "video": Media.video,
    "file": Media.file,
}

MEDIA = {kind: _COUNTS[label] for kind, label in MEDIA_LABELS.items()}
"""How to count each content part that is media, by its ``type``."""

_ADDRESSES = ("url", "data", "file_data", "image_url", "audio_url", "video_url", "source", "file_url")


_DATA_URL = re.compile(r"data:([a-z]+)/[\w.+-]+[;,]", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{64}")
_MIME_FIELDS = ("media_type", "mime_type", "mimeType", "mediaType", "content_type", "contentType", "format")
_BEGINS = {"iVBORw0KGgo": "image", "/9j/": "image", "R0lGOD": "image", "UklGR": "image", "JVBERi0": "application"}
_TYPES = {"image": "image", "audio": "input_audio", "video": "video", "application": "file", "text": "file"}


def data_in(value: str, fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the type of media part for a string that is data, and such a part; ``None`` for texts.

    Data is a data URL, or base64 after a media type in another field, or with the first bytes of a known format.
    """
    if (url := _DATA_URL.match(value)) is not None:
        kind = _TYPES.get(url[1].lower())
        return (kind, {"url": value}) if kind else None
    if _BASE64.match(value) is None:
        return None
    stated = next((mime for key in _MIME_FIELDS if isinstance(mime := fields.get(key), str)), "").lower()
    first = stated.partition("/")[0] or next((kind for begin, kind in _BEGINS.items() if value.startswith(begin)), "")
    kind = _TYPES.get(first)
    return (kind, {"data": value, "media_type": stated}) if kind else None


def _address(value: object, part: Mapping[str, Any]) -> tuple[str, str]:
    """Return the string with the data or its URL, and the media type if the part states one."""
    for holder in (value, part):
        for _ in range(3):  # {"source": {"type": "base64", "media_type": …, "data": …}}
            if not isinstance(holder, Mapping):
                break
            mime = holder.get("media_type", holder.get("mime_type"))
            holder = next((holder[key] for key in _ADDRESSES if key in holder), None)
            if isinstance(holder, str):
                return holder, mime if isinstance(mime, str) else ""
        if isinstance(holder, str):
            return holder, ""
    return "", ""


def _data(address: tuple[str, str]) -> _Data | None:
    """The data in a data URL or bare base64; ``None`` for the address of something elsewhere."""
    source, mime = address
    if source[:5].lower() == "data:":
        comma = source.find(",", 0, 1024)
        return _Data(source[5:comma].partition(";")[0].lower(), source, comma + 1) if comma > 0 else None
    if not source or "://" in source[:32] or len(source) < 16:
        return None
    return _Data(mime.lower(), source, 0)


def _detail(value: object, part: Mapping[str, Any]) -> str:
    for holder in (value, part):
        detail = holder.get("detail") if isinstance(holder, Mapping) else None
        if isinstance(detail, str):
            return detail.lower()
    return "auto"


def _size(head: bytes) -> Size | None:
    if not head.startswith(_MAGIC) and head[8:12] not in _ISO_BRANDS:
        return None
    import imagesize  # takes 4 ms and 0.7 MB

    width, height = imagesize.get(io.BytesIO(head))
    if not (0 < width <= LARGEST_SIDE and 0 < height <= LARGEST_SIDE):
        return None
    return int(width) or 1, int(height) or 1


def _sound_rate(data: _Data, form: str) -> int:
    """Return the bytes per second."""
    head = data.text[data.start : data.start + 64]
    if form == "wav" or "wav" in data.mime or head.startswith("UklGR"):
        riff = _Data("", head, 0).head()
        stated = int.from_bytes(riff[28:32], "little") if riff[:4] == b"RIFF" and riff[12:16] == b"fmt " else 0
        # An impossible rate in a header would make the estimated length far too long or too short.
        return stated if 8_000 <= stated <= 1_600_000 else _BYTES_PER_SECOND["wav"]
    return _BYTES_PER_SECOND.get(form, _BYTES_PER_SECOND_OTHERS)


def _plain_text(value: object, part: Mapping[str, Any]) -> str | None:
    """Return the text of a document: {"source": {"type": "text", "data": …}}."""
    for holder in (value, part):
        source = holder.get("source") if isinstance(holder, Mapping) else None
        if isinstance(source, Mapping) and source.get("type") == "text" and isinstance(source.get("data"), str):
            return str(source["data"])
    return None


Size = tuple[int, int]  # width and height in pixels, each at least 1

# A file's header can state any size.
LARGEST_SIDE = 100_000


class ImageRule(ABC):
    """Counts one image. ``detail`` is OpenAI's: low, high, auto, original, or any other string from a client.

    An image of unknown size (``None``) counts as the largest one.
    """

    @abstractmethod
    def tokens(self, size: Size | None, detail: str) -> int:
        """Return the tokens of an image."""


@dataclass(frozen=True, slots=True)
class Tiles(ImageRule):
    """OpenAI's older rule: scale to fit 2048 x 2048, then to 768 on the short side, then count tiles of 512 pixels."""

    base: int
    tile: int

    def tokens(self, size: Size | None, detail: str) -> int:
        if detail == "low":
            return self.base
        if size is None:
            return self.base + self.tile * 4 * 2  # 2048 × 768
        width, height = _fit(size, 2048)
        shrink = min(1.0, 768 / min(width, height))
        return self.base + self.tile * _pieces(width * shrink, 512) * _pieces(height * shrink, 512)


@dataclass(frozen=True, slots=True)
class Patches(ImageRule):
    """OpenAI's newer rule: scale to at most ``cap`` patches of 32 pixels, then multiply by the model's factor.

    By OpenAI's bills, ``detail: low`` saves nothing. ``original`` allows 10,000 patches if the model supports it.
    """

    factor: float
    cap: int = 1536
    original: int | None = None

    def tokens(self, size: Size | None, detail: str) -> int:
        cap = self.original if self.original and detail == "original" else self.cap
        if size is None:
            return math.ceil(cap * self.factor)
        width, height = size
        patches = _pieces(width, 32) * _pieces(height, 32)
        if patches > cap:
            shrink = math.sqrt(32 * 32 * cap / (width * height))
            across, down = width * shrink / 32, height * shrink / 32
            # Scale down a little more, so that one side is a whole number of patches.
            shrink = min(max(1, math.floor(across)) / across, max(1, math.floor(down)) / down)
            patches = min(cap, math.ceil(across * shrink - 1e-9) * math.ceil(down * shrink - 1e-9))
        return math.ceil(patches * self.factor)


@dataclass(frozen=True, slots=True)
class Area(ImageRule):
    """Tokens by area, after scaling to a longest side, with a cap (Anthropic; Qwen's patches give the same count)."""

    pixels_per_token: int
    longest: int
    cap: int

    def tokens(self, size: Size | None, detail: str) -> int:
        if size is None:
            return self.cap
        width, height = _fit(size, self.longest)
        return min(self.cap, math.ceil(width * height / self.pixels_per_token))


@dataclass(frozen=True, slots=True)
class Crops(ImageRule):
    """Google's rule: a small image is one crop, others are cut into crops of at most 768 pixels."""

    crop: int = 258
    cap: int = 6192

    def tokens(self, size: Size | None, detail: str) -> int:
        if size is None:
            return self.cap
        if max(size) <= 384:
            return self.crop
        unit = max(256, min(768, int(min(size) / 1.5)))
        return min(self.cap, self.crop * _pieces(size[0], unit) * _pieces(size[1], unit))


@dataclass(frozen=True, slots=True)
class Fixed(ImageRule):
    """A fixed number of tokens for every image."""

    each: int

    def tokens(self, size: Size | None, detail: str) -> int:
        return self.each


RULES: Mapping[str, ImageRule] = {
    "gpt-4o": Tiles(85, 170),
    "gpt-4o-mini": Tiles(2833, 5667),
    "o-series": Tiles(75, 150),
    "gpt-5": Tiles(70, 140),
    "computer-use": Tiles(65, 129),
    "gpt-4.1-mini": Patches(1.62),
    "gpt-4.1-nano": Patches(2.46),
    "o4-mini": Patches(1.72),
    "gpt-5-mini": Patches(1.62),
    "gpt-5-nano": Patches(2.46),
    # Billed with 1.2 and up to 2,500 patches (community.openai.com topics 1372291 and 1377015); the guide has 1,536
    # patches and the factors of GPT-5 for the small ones.
    "gpt-5.2": Patches(1.2),
    "gpt-5.4": Patches(1.2, 2500, original=10_000),
    "gpt-5.4-mini": Patches(1.62, 2500),
    "gpt-5.4-nano": Patches(2.46),
    "claude": Area(750, 1568, 1600),
    # From Opus 4.7 on images keep up to 2,576 pixels.
    "claude-4.7": Area(750, 2576, 4784),
    "gemini": Crops(),
    # media_resolution: high is the default for images.
    "gemini-3": Fixed(1120),
    # Patches of 28 pixels, 16,384 at most.
    "qwen-vl": Area(28 * 28, 8192, 16_384),
    # About the tokens of a large picture with most models.
    "unknown": Fixed(2000),
}


def image_rule(name: str) -> ImageRule:
    """Return the rule with this name. Raises ``ConfigurationError`` if there is none."""
    if name not in RULES:
        raise ConfigurationError(f"unknown rule for images (got {name!r}). Fix: use one of {', '.join(RULES)}.")
    return RULES[name]


def _fit(size: Size, longest: int) -> tuple[float, float]:
    shrink = min(1.0, longest / max(size))
    return max(1.0, size[0] * shrink), max(1.0, size[1] * shrink)


def _pieces(length: float, piece: int) -> int:
    # Subtract a billionth so that 1024.0000001 is two pieces of 512.
    return max(1, math.ceil(length / piece - 1e-9))
