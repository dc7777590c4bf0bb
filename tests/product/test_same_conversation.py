"""A client that writes old messages in other forms pays for no more summaries than one that doesn't."""

import contextlib
import copy
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.server.loopback import serve
from tests.kit.any_api import Upstream
from tests.kit.combinations import combined
from tests.kit.messages import assistant, user, words
from tests.kit.other_forms import (
    IDS,
    PICTURE,
    Change,
    Units,
    empty_fields,
    fresh_ids,
    ids_of_units,
    in_api,
    no_reasoning,
    objects,
    one_after_another,
    other_content,
    signed_urls,
    spaced_arguments,
    spaces,
    stamped,
    transport,
    turn,
    windows_lines,
)
from tests.kit.scripted import proxied
from tests.kit.three_apis import APIS, PATHS

TURNS = 24
RESUMED = 13
WINDOW = 16_000


@contextlib.contextmanager
def sending(api: str, folder: Path, upstream: Upstream, **policy: Any) -> Iterator[Callable[[Units], httpx.Response]]:
    """Return a function that sends units of an API through the proxy."""
    provider, speaks = ("anthropic", ["messages"]) if api == "messages" else ("openai", ["responses", "chat"])
    with serve(upstream.app) as behind, httpx.Client(trust_env=False, timeout=60) as http:
        profile = {"context_window": WINDOW, "max_output_tokens": 500, "tokenizer": "o200k_base", "images": "gpt-4o"}
        settings = {
            "upstreams": {"main": {"provider": provider, "base_url": f"{behind}/v1", "api_key": "k", "speaks": speaks}},
            "models": [{"match": "*", "upstream": "main", "profile": profile}],
            "policies": {"default": {"prepare": None, **policy}},
        }
        with proxied(settings, folder) as url:

            def send(units: Units) -> httpx.Response:
                body: dict[str, Any] = {"model": "m", "input" if api == "responses" else "messages": units}
                body |= {"max_tokens": 200} if api == "messages" else {}
                response = http.post(f"{url}{PATHS[api]}", json=body, headers={"authorization": "Bearer k"})
                assert response.status_code == 200, response.text
                return response

            yield send


def session(api: str, folder: Path, change: Change) -> tuple[Upstream, list[str]]:
    """Return the upstream after a session in which every request has another form, and how each summary came."""
    upstream, messages, found = Upstream(), list[Any](), list[str]()
    with sending(api, folder, upstream) as send:
        for number in range(TURNS):
            asked, *rest = turn(number)
            units = in_api(api, [*messages, asked])
            change(api, units, number)
            found.append(send(units).headers.get("x-compaction-summary", ""))
            if number == TURNS - 1:
                sent = {one[name] for one in objects(units) for name in IDS if name in one}
                got = upstream.bodies[-1].get("messages") or upstream.bodies[-1]["input"]
                assert {one[name] for one in objects(got) for name in IDS if name in one} <= sent
            messages += [asked, *rest]
    return upstream, found


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Return the number of summaries of the session in one form, for each API."""
    return {api: len(session(api, tmp_path_factory.mktemp(api), lambda *_: None)[0].summaries) for api in APIS}


@pytest.mark.parametrize(("change", "api"), combined(3, [fresh_ids, signed_urls, transport], APIS))
def test_another_form_in_each_request_costs_no_summary(
    tmp_path: Path, control: dict[str, int], api: str, change: Change
) -> None:
    upstream, found = session(api, tmp_path, change)
    assert 0 < len(upstream.summaries) <= control[api]
    assert "digest" not in found


@pytest.mark.parametrize(
    ("change", "api"),
    combined(
        4,
        [
            *(ids_of_units, other_content, empty_fields, no_reasoning, spaces, spaced_arguments),
            *(stamped, windows_lines, one_after_another),
        ],
        APIS,
    ),
)
def test_a_session_that_goes_on_in_another_form_costs_no_summary(
    tmp_path: Path, control: dict[str, int], api: str, change: Change
) -> None:
    upstream, found = session(api, tmp_path, lambda api, units, number: change(api, units, int(number > RESUMED)))
    assert 0 < len(upstream.summaries) <= control[api] + 1
    assert "digest" not in found


def test_results_of_exchanged_calls_are_another_conversation(tmp_path: Path) -> None:
    messages = [message for number in range(TURNS) for message in turn(number)]
    with sending("chat", tmp_path, upstream := Upstream()) as send:
        send(in_api("chat", messages))
        before = len(upstream.summaries)
        send(in_api("chat", messages))
        assert len(upstream.summaries) == before > 0
        exchanged = json.loads(json.dumps(copy.deepcopy(messages)))
        first, second = exchanged[2], exchanged[3]
        first["tool_call_id"], second["tool_call_id"] = second["tool_call_id"], first["tool_call_id"]
        send(in_api("chat", exchanged))
        assert len(upstream.summaries) > before


def summaries_of(folder: Path, turns: Iterable[Units]) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of summaries of a session, and how each request got its own and why."""
    upstream = Upstream()
    with sending("chat", folder, upstream) as send:
        answers = [send(messages).headers for messages in turns]
    names = ("x-compaction-summary", "x-compaction-summary-cause")
    return len(upstream.summaries), [(one.get(names[0], ""), one.get(names[1], "")) for one in answers]


def growing(question: Callable[[int], Any], *, head: Units | None = None, clock: bool = False) -> Iterator[Units]:
    """Yield the messages of each request. With a clock, the first question changes each time."""
    messages = [*(head or ()), user("The time is 00.")]
    for number in range(TURNS):
        messages += [assistant(f"Answer {number}: {words(40, f'a{number}x')}"), user(question(number))]
        sent = copy.deepcopy(messages)
        sent[len(head or ())]["content"] = f"The time is {number if clock else 0}."
        yield sent


PICTURE_PART = {"type": "image_url", "image_url": {"url": PICTURE.format(1), "detail": "high"}}
LARGE: dict[str, Callable[[int], Any]] = {
    "questions": lambda number: f"Question {number}: {words(5_500, f'q{number}x')}",
    "pictures": lambda number: [{"type": "text", "text": f"Question {number}."}, *[PICTURE_PART] * 5],
}


@pytest.mark.parametrize("kind", LARGE)
def test_turns_that_fill_much_of_the_window_are_summarized_however_often(tmp_path: Path, kind: str) -> None:
    made, found = summaries_of(tmp_path, growing(LARGE[kind]))
    assert TURNS / 4 < made < TURNS
    assert "digest" not in dict(found)


@pytest.mark.parametrize("length", [14_200, 14_500])
def test_a_large_head_costs_no_summary_at_each_turn(tmp_path: Path, length: int) -> None:
    head = [{"role": "system", "content": words(length, "rule")}]
    made, found = summaries_of(tmp_path, growing(lambda number: words(60, f"q{number}x"), head=head))
    assert made <= TURNS / 4
    assert "made" in dict(found)


def test_summaries_of_a_client_that_changes_its_first_message_end_soon(tmp_path: Path) -> None:
    made, found = summaries_of(tmp_path, growing(LARGE["questions"], clock=True))
    assert made <= TURNS / 6
    assert ("digest", "unused") in found
