"""Test that records, metrics, and pages state how many names of the removed part a prompt still has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.kit.messages import assistant, call, result, system, user
from tests.kit.scripted import behind, client, key_hash
from tests.kit.upstream import StandIn
from tests.kit.waiting import until
from tests.product.test_metrics import added, scrape, total

ADMIN = "cp-admin"
FILLER = "plain words that are not names of anything "
IDENTIFIERS = [f"load_{number}_table_of_the_warehouse" for number in range(280)]
FILES = [f"src/part{number}/module{number}.py" for number in range(12)]
KINDS = ("files", "identifiers", "numbers", "errors")


def session(turns: int) -> list[Any]:
    """An agent's session that names files and identifiers at its beginning only."""
    messages = [system(), user("repair the loader.")]
    for number, file in enumerate(FILES):
        messages += [
            assistant(None, call(f"c{number}", path=file)),
            result(f"c{number}", f"{' '.join(IDENTIFIERS[number::12])} {FILLER * 60}"),
        ]
    for _ in range(turns):
        messages += [assistant(FILLER * 40), user(FILLER * 40)]
    return messages


@pytest.fixture(params=["archive", "no archive"])
def archived(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "archive")


@pytest.fixture
def place(tmp_path: Path, archived: bool) -> Iterator[tuple[str, StandIn]]:
    """The URL of a proxy, and its upstream."""
    upstream = StandIn(window=16_000)
    policy: dict[str, Any] = {} if archived else {"archive": None}
    with behind(upstream, tmp_path, policy=policy, admin={"keys": [key_hash(ADMIN)]}) as url:
        yield url, upstream


def asked(caller: openai.OpenAI, messages: list[Any]) -> str:
    answer = caller.chat.completions.with_raw_response.create(model="gpt-5", messages=messages)
    return str(answer.headers["x-compaction-id"])


def recorded(url: str, id: str) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=30) as admin:
        assert until(lambda: admin.get(f"/compaction/requests/{id}").status_code == 200)
        one: dict[str, Any] = admin.get(f"/compaction/requests/{id}").json()
        one["page"] = admin.get(f"/compaction/view/{id}").text
    return one


def test_a_compaction_states_the_names_that_its_prompt_still_has(place: tuple[str, StandIn], archived: bool) -> None:
    url, upstream = place
    messages = session(12)
    before = scrape(url)
    with client(url) as caller:
        small, large = asked(caller, messages[:2]), asked(caller, messages)
        sent = str(upstream.requests[-1].body["messages"])
        again = asked(caller, [*messages, assistant("done."), user(f"also {' '.join(IDENTIFIERS[:50])}.")])
    first, found = recorded(url, small), recorded(url, large)
    assert (first["verdict"], first["retention"]) == ("none", None)
    assert "Names in the removed part" not in first["page"]
    assert found["verdict"] == "compacted"
    retention = found["retention"]
    kept = sum(name in sent for name in IDENTIFIERS)
    gone = len(IDENTIFIERS) - kept
    assert 0 < kept < len(IDENTIFIERS)
    place_of_gone = {"archived": gone, "lost": 0} if archived else {"archived": 0, "lost": gone}
    assert retention["identifiers"] == {"kept": kept, **place_of_gone}
    files = sum(file.rpartition("/")[2] in sent for file in FILES)
    assert retention["files"]["kept"] == files > 0
    assert sum(retention["files"].values()) == len(FILES)
    named = sum(sum(retention[kind].values()) for kind in KINDS)
    assert retention["share"] == round((kept + files) / named, 4)
    assert "Names in the removed part" in found["page"]
    assert f'<td class="n">{kept}</td><td class="n">{gone if archived else 0}</td>' in found["page"]
    # A turn that reuses the checkpoint has its figures.
    assert recorded(url, again)["retention"] == retention
    assert until(lambda: total(added(url, before), "compaction_names_kept_ratio_count") == 2)
    increased = added(url, before)
    assert total(increased, "compaction_names_kept_ratio_count", policy="default") == 2
    assert total(increased, "compaction_names_kept_ratio_sum") == pytest.approx(2 * (kept + files) / named)


def test_a_shortened_result_counts_without_a_summary(place: tuple[str, StandIn], archived: bool) -> None:
    url, upstream = place
    messages = [system(), user("repair the loader.")]
    for number in range(3):
        lines = "\n".join(f"{name} = read() # {FILLER * 5}" for name in IDENTIFIERS[number:270:3])
        messages += [assistant(None, call(f"c{number}", path=FILES[number])), result(f"c{number}", lines)]
    messages += [assistant(FILLER * 30), user("go on."), assistant(FILLER * 30), user("go on.")]
    with client(url) as caller:
        id = asked(caller, messages)
    sent = str(upstream.requests[-1].body["messages"])
    found = recorded(url, id)
    assert (found["verdict"], found["summary"]["checkpoints"]) == ("compacted", 0)
    # The newest result stays whole, so its names don't count.
    shortened = [*IDENTIFIERS[0:270:3], *IDENTIFIERS[1:270:3]]
    kept = sum(name in sent for name in shortened)
    assert 0 < kept < len(shortened)
    gone = len(shortened) - kept
    place_of_gone = {"archived": gone, "lost": 0} if archived else {"archived": 0, "lost": gone}
    assert found["retention"]["identifiers"] == {"kept": kept, **place_of_gone}
