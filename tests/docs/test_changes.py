"""Typical changes, made in a copy of the project: each touches few files and works.

A change is a list of edits and a script that checks it. To add one, add a row to a table in ``tests/docs/changes/``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.changes import apis, compaction, features
from tests.kit.changes import copied

CHANGES = {**compaction.CHANGES, **features.CHANGES, **apis.CHANGES}


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_touches_few_files_and_works(name: str, tmp_path: Path) -> None:
    change = CHANGES[name]
    assert len(change.files) <= change.most
    folder = copied(tmp_path)
    assert change.fails(folder)
    change.make(folder)
