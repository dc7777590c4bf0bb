"""A process remembers messages in two places: their facts, and stored summaries. Each other memory has its reason."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROOMS = ("compaction", "dialects", "overflow", "pipeline", "recall", "summary", "tokens", "upstream")

MEMORIES = {
    "pipeline.facts_cache": "the facts, by message",
    "summary.store": "the stored summaries",
    # Before there are facts.
    "dialects.units": "the class of the next four",
    "dialects.request": "whether a message has media: without it, 4 ms per MB",
    "dialects.messages.request": "a message's units: without it, 7 ms per MB",
    "dialects.responses.request": "an item's part, which groups items into units: without it, 0.5 ms per MB",
    "dialects.responses.references": "marks that find the place of a reference, which stay if the counter changes",
    "pipeline.job": "the folders that system prompts state, which aren't messages",
    # Of a conversation, not of its messages. Each has a few numbers and a digest.
    "pipeline.sent_prompts": "whether a prompt begins with the one before, which a summary doesn't show",
    "pipeline.summaries": "the expected size of a summary",
    "summary.single_flight": "failed summaries, and how a conversation uses its summaries",
    "pipeline.features.usage_feedback": "what the upstream reported for the last turns",
    "recall.rounds": "the rounds that a client doesn't have, and sends no message of",
    "pipeline.features.recall": "the models that refuse the tool",
    "upstream.traits": "what upstreams don't take; it hashes the ids of users that are too long",
}

CACHES = {"ByDigest", "LRUCache", "OrderedDict", "TTLCache", "TenantCache"}
DIGESTS = {"ByDigest", "digest", "hashlib", "xxhash"}


def names_in(source: str) -> set[str]:
    """Return the names that a module uses or defines."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.ClassDef(name=name):
                found.add(name)
    return found


def remembers(source: str) -> bool:
    """Return whether a module has a cache, and digests that may be its keys."""
    names = names_in(source)
    return not names.isdisjoint(CACHES) and not names.isdisjoint(DIGESTS)


@pytest.mark.long
def test_only_these_remember_messages() -> None:
    found = {
        ".".join(path.relative_to(ROOT / "proxy").with_suffix("").parts)
        for room in ROOMS
        for path in (ROOT / "proxy" / room).rglob("*.py")
        if remembers(path.read_text())
    }
    assert found == MEMORIES.keys()


def test_another_one_is_found() -> None:
    assert remembers("sizes = ByDigest(len)")
    assert remembers("import xxhash\nseen = LRUCache(10)\nseen[xxhash.xxh3_128_digest(raw)] = raw")
    assert not remembers("seen = LRUCache(10)\nseen[model] = True")
