"""Results are made once for the same bytes, and a full cache is emptied."""

import hashlib
import json

from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.identity import digest
from proxy.dialects.units import ByDigest

TEXTS = st.text(st.characters(exclude_categories=()), max_size=20) | st.text(st.characters(max_codepoint=127))


def test_a_full_cache_is_emptied() -> None:
    computed: list[bytes] = []
    lengths = ByDigest(lambda raw: computed.append(raw) or len(raw), most=2)  # type: ignore[func-returns-value]
    assert lengths.of([b"a", b"b", b"c", b"a", b"c"]) == [1] * 5
    assert computed == [b"a", b"b", b"c", b"a"]


@given(st.dictionaries(TEXTS, TEXTS | st.none() | st.floats(allow_nan=False)) | TEXTS | st.lists(TEXTS))
def test_a_digest_is_that_of_canonical_json(value: object) -> None:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
    assert digest(value) == digest(value, large=True) == hashlib.sha256(canonical).digest()
