"""Count an image's tokens by the rule of its model's family, from its size in pixels.

The rules are the providers' own, from OpenAI's guide "Images and vision", Anthropic's "Vision" and Google's
"Understand and count tokens". If measured bills are above the guide, the rule uses the higher figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from proxy.errors import ConfigurationError

Size = tuple[int, int]
"""Width and height in pixels, each at least 1."""

# A file's header can state any size.
LARGEST_SIDE = 100_000


class Rule(Protocol):
    """Counts one image. ``detail`` is OpenAI's: low, high, auto, original, or any other string from a client.

    An image of unknown size (``None``) counts as the largest one.
    """

    def tokens(self, size: Size | None, detail: str) -> int: ...


@dataclass(frozen=True, slots=True)
class Tiles:
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
class Patches:
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
class Area:
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
class Crops:
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
class Fixed:
    """A fixed number of tokens for every image."""

    each: int

    def tokens(self, size: Size | None, detail: str) -> int:
        return self.each


RULES: Mapping[str, Rule] = {
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


def image_rule(name: str) -> Rule:
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
