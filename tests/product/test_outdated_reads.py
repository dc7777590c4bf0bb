"""Results of reading a file that was read again or changed, and results with a form that loses nothing."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.kit.any_api import Upstream, sdk, strings, units
from tests.kit.messages import assistant, call, result, user, words
from tests.kit.three_apis import PATHS

ANYTIME = {"trigger": {"tokens": 3_000}, "keep": {"messages": 2}}
POLICY: dict[str, Any] = {"trigger": None, "duplicates": ANYTIME, "truncate_args": None, "evict_results": None}
OLD = "\n".join(f"def first_version_{n}(): return {n}" for n in range(60))
NEW = "\n".join(f"def second_version_{n}(): return {n}" for n in range(60))


def exchange(id_: str, tool: str, text: str, **arguments: Any) -> list[Any]:
    return [assistant(None, call(id_, tool, **arguments)), result(id_, text)]


def later(number: int) -> list[Any]:
    return exchange(f"w{number}", "run", words(500, f"w{number}x"), command=f"step {number}")


@pytest.mark.parametrize("api", list(PATHS))
def test_a_read_becomes_a_note_once_the_file_was_changed(api: str, tmp_path: Path) -> None:
    edit = {"file_path": "src/app.py", "old_string": "1", "new_string": "2"}
    messages = [
        user("Mend it."),
        *exchange("r1", "Read", OLD, file_path="src/app.py"),
        *exchange("r2", "Read", NEW, file_path="src/other.py"),
        *exchange("e1", "Edit", "Error: the text was not found", **(edit | {"file_path": "src/other.py"})),
        *exchange("e2", "Edit", "The file is updated.", **edit),
        *(message for number in range(12) for message in later(number)),
    ]
    upstream = Upstream()
    with sdk(api, tmp_path, upstream, POLICY) as send:
        for end in range(len(messages) - 22, len(messages) + 1, 2):
            send(messages[:end])
    prompts = [units(body) for body in upstream.bodies]
    last = list(strings(prompts[-1]))
    assert OLD not in last
    assert NEW in last, "a change that failed counts for nothing"
    note = next(text for text in last if "changed the file" in text)
    assert "content of src/app.py" in note
    assert "archive as" in note
    assert "first_version_" in note, "names of the content stay"
    changed = [old for old, new in itertools.pairwise(prompts) if old != new[: len(old)]]
    assert len(changed) == 1, "the prompt changes when the stage runs, and then only grows"
