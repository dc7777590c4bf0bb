"""Results of reading a file that was read again or changed, and results with a form that loses nothing."""

from __future__ import annotations

import itertools
import json
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


@pytest.mark.parametrize("api", list(PATHS))
def test_a_read_becomes_a_note_once_its_lines_were_read_again(api: str, tmp_path: Path) -> None:
    parts = [OLD.replace("first", f"part{n}") for n in range(3)]
    messages = [
        user("Look."),
        *exchange("r1", "read", parts[0], path="a.py", offset=10, limit=60),
        *exchange("r2", "read", parts[1], path="a.py", offset=200, limit=60),
        *exchange("r3", "read", f"{parts[2]}\n{parts[2]}", path="a.py", offset=1, limit=120),
        *(message for number in range(8) for message in later(number)),
    ]
    upstream = Upstream()
    with sdk(api, tmp_path, upstream, POLICY) as send:
        send(messages)
    last = list(strings(upstream.bodies[-1]))
    assert [part in last for part in parts[:2]] == [False, True]
    assert any("read a.py again" in text for text in last)


@pytest.mark.parametrize("api", list(PATHS))
def test_a_result_that_fits_without_a_loss_keeps_everything(api: str, tmp_path: Path) -> None:
    rows = [{"id": number, "price": 1.0, "name": f"Row {number}"} for number in range(120)]
    pretty = json.dumps({"rows": rows}, indent=8)
    numbered = "\n".join(f"{n:>6}→line {n} has {words(5, str(n))}" for n in range(1, 200))
    messages = [
        user("Look."),
        *exchange("a", "fetch", pretty),
        *exchange("b", "Read", numbered, file_path="x.txt"),
        *(message for number in range(8) for message in later(number)),
    ]
    upstream = Upstream()
    policy = {**POLICY, "evict_results": {"max_tokens": 2_400, **ANYTIME}}
    with sdk(api, tmp_path, upstream, policy) as send:
        send(messages)
    last = list(strings(upstream.bodies[-1]))
    (compact,) = (text for text in last if text.startswith('{\n"rows"'))
    assert json.loads(compact) == {"rows": rows}
    assert compact.count('"price":1.0') == 120
    (bare,) = (text for text in last if "left out the numbers of the next 199 lines. The first one is      1→]" in text)
    assert bare.count("\nline ") == 199
