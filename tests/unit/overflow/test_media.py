"""Read the number of images and files that an upstream takes."""

import itertools
import json

import pytest

from bench.overflow.lines import CATALOGUE, lines
from proxy.overflow import media_limit, recognise
from proxy.overflow.media import MANY_IMAGES, MediaLimit
from tests.kit.overflow_wordings import MEDIA_NEAR_MISSES, MEDIA_WORDINGS

IMAGES = frozenset({"image"})


def found(text: str, sent: list[str], *, status: int = 400, request: bytes = b"{}") -> MediaLimit | None:
    raw = json.dumps({"error": {"message": text}}).encode()
    return media_limit(status, b"data: " + raw + b"\n\n" if status == 200 else raw, request, sent)


@pytest.mark.parametrize("wording", MEDIA_WORDINGS)
def test_every_wording_names_its_limit(wording: str) -> None:
    nouns = {"image": "images", "file": "documents", "video": "videos"}
    for (kind, noun), (most, count), status in itertools.product(
        nouns.items(), [(1, 2), (16, 17), (100, 140)], [200, 400, 413, 422]
    ):
        text = wording.format(most=most, count=count, nouns=noun, noun=noun[:-1])
        limit = found(text, [kind] * count + ["audio"] * 200, status=status)
        assert limit is not None, text
        assert (limit.most, limit.guessed, kind in limit.kinds) == (most, False, True), text
        assert recognise(status, json.dumps({"error": {"message": text}}).encode()) is None, text


@pytest.mark.parametrize("text", MEDIA_NEAR_MISSES)
def test_other_errors_about_images_are_no_limit(text: str) -> None:
    assert found(text, ["image"] * 24) is None
    assert found(text, ["image"]) is None


def test_pixels_of_many_images() -> None:
    text = (
        "messages.5.content.1.image.source.base64.data: At least one of the image dimensions exceed max allowed size "
        "for many-image requests: 2000 pixels"
    )
    assert found(text, ["image"] * 21) == (IMAGES, MANY_IMAGES, True)
    assert found(text, ["image"] * 20) is None


def test_words_of_the_request_are_no_limit() -> None:
    said = "At most 16 image(s) may be provided in one prompt."
    request = json.dumps({"messages": [{"role": "user", "content": said}]}).encode()
    assert found(f"Bad value: {said}", ["image"] * 24, request=request) is None


def test_catalogue() -> None:
    if not CATALOGUE.exists():
        pytest.skip("the catalogue of real errors is not here")
    sent = ["image"] * 200 + ["file"] * 100
    read = [line for line in lines(CATALOGUE) if media_limit(line.status, line.body, b"{}", sent)]
    assert not [line.id for line in read if line.overflow]
    assert all(b"many-image" in line.body or b"At most 1 image(s)" in line.body for line in read)
