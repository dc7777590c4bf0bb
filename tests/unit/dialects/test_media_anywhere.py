"""Media count as media in any field, text files as their text, and a new type of answer by its row alone."""

import base64
import json
from typing import Any

import pytest

from proxy.compaction.format import Format
from proxy.dialects.apis import DIALECTS
from proxy.limits.profiles import Profile
from tests.kit.three_apis import APIS

PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1Pe" + "A" * 240_000
LINK = f"data:image/png;base64,{PICTURE}"
PAGES = "data:application/pdf;base64,JVBERi0x" + "A" * 240_000
TEXT = "data:text/plain;base64," + base64.b64encode(b"The vault opens with 7741.").decode()

FIELDS: list[dict[str, Any]] = [
    {"images": [{"type": "image_url", "image_url": {"url": LINK}}]},
    {"images": [PICTURE]},
    {"picture": LINK},
    {"picture": {"mimeType": "image/png", "blob": PICTURE}},
]
PARTS: list[dict[str, Any]] = [
    {"type": "document_url", "document_url": PAGES},
    {"type": "picture", "blob": PICTURE, "mimeType": "image/png"},
    {"inlineData": {"mimeType": "image/png", "data": PICTURE}},
    {"type": "resource", "resource": {"blob": PICTURE, "mimeType": "image/png"}},
    {"type": "clip", "url": f"data:audio/wav;base64,{PICTURE}"},
]


def format_of(api: str) -> Format:
    return DIALECTS[api].counters(Profile(model="m", tokenizer="o200k_base", images="gpt-4o")).format


def tokens(api: str, unit: Any) -> int:
    return format_of(api).read(json.dumps(unit).encode()).tokens


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("api", ["chat", "messages"])
def test_media_in_any_field_of_a_message(api: str, fields: dict[str, Any]) -> None:
    assert 60 < tokens(api, {"role": "assistant", "content": "Here.", **fields}) < 2_000


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("api", APIS)
def test_media_in_any_part(api: str, part: dict[str, Any]) -> None:
    assert 60 < tokens(api, {"role": "user", "content": [part]}) < 15_000


@pytest.mark.parametrize("form", [{"file_data": TEXT}, {"file": {"filename": "a.txt", "file_data": TEXT}}])
@pytest.mark.parametrize("kind", ["input_file", "file"])
@pytest.mark.parametrize("api", APIS)
def test_a_text_file_counts_as_its_text(api: str, kind: str, form: dict[str, Any]) -> None:
    one = tokens(api, {"role": "user", "content": [{"type": kind, **form}]})
    assert 5 < one < 30


def test_results_of_unknown_types_are_duplicates_only_if_they_say_the_same() -> None:
    format = format_of("responses")
    one, same, other = (
        format.read(json.dumps({"type": "new_call_output", "call_id": id, "found": text}).encode()).said
        for id, text in (("c1", "a"), ("c2", "a"), ("c3", "b"))
    )
    assert one == same != other
