"""Chat streams of made-up servers reach the SDKs whole, or end with an error: 150, or 10,000 with ``--full``."""

import json
from collections import Counter
from typing import Any

import anthropic
import openai
import pytest

from tests.kit.odd_answers import Said, Sent, Upstream, odd_answer

SEEDS, SEEDS_FULL = 75, 10_000
BATCHES = 5
STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
STATUSES = {"length": "max_output_tokens", "content_filter": "content_filter"}


class Failed(Exception):
    """The SDK raised an exception for an error event or a lost connection."""


Clients = tuple[Upstream, anthropic.Anthropic, openai.OpenAI]


def told_message(claude: anthropic.Anthropic, name: str, *, stream: bool = True) -> Said:
    """Return the answer that the SDK of ``/v1/messages`` reads."""
    asked: Any = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": name}]}
    try:
        if stream:
            with claude.messages.stream(**asked) as events:
                made: Any = events.get_final_message()
        else:
            made = claude.messages.create(**asked)
    except (anthropic.APIError, anthropic.AnthropicError) as error:
        raise Failed from error
    said = Said(end=made.stop_reason, usage=(made.usage.input_tokens, made.usage.output_tokens))
    for block in made.content:
        said.thinking += block.thinking if block.type == "thinking" else ""
        said.text += block.text if block.type == "text" else ""
        said.calls += [(block.name, block.input)] if block.type == "tool_use" else []
    ids = [block.id for block in made.content if block.type == "tool_use"]
    assert len({*ids}) == len(ids)
    return said


def told_response(gpt: openai.OpenAI, name: str, *, stream: bool = True) -> Said:
    """Return the answer that the SDK of ``/v1/responses`` reads. Its events agree with its last one."""
    asked: Any = {"model": "m", "input": name}
    try:
        if stream:
            events: list[Any] = list(gpt.responses.create(**asked, stream=True))
            if events[-1].type not in ("response.completed", "response.incomplete"):
                raise Failed(events[-1].type)
            assert [event.sequence_number for event in events] == list(range(len(events)))
            made = events[-1].response
            texts = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert "".join(texts) == made.output_text
            done = [event.item for event in events if event.type == "response.output_item.done"]
            assert {item.id for item in done} == {item.id for item in made.output}
        else:
            made = gpt.responses.create(**asked)
    except openai.APIError as error:
        raise Failed from error
    usage = made.usage and (made.usage.input_tokens, made.usage.output_tokens)
    said = Said(text=made.output_text, end=made.status, usage=usage)
    if made.incomplete_details:
        said.end = made.incomplete_details.reason
    for item in made.output:
        said.thinking += "".join(part.text for part in item.summary) if item.type == "reasoning" else ""
        said.calls += [(item.name, json.loads(item.arguments))] if item.type == "function_call" else []
    return said


def check(front: Clients, seed: int) -> str:
    """Check an answer of a server. Return how it ended."""
    upstream, claude, gpt = front
    said, sent = odd_answer(seed)
    name = f"answer {seed}"
    upstream.answers[name] = sent
    whole = len(sent.body) >= sent.finished and said.end != "error"
    outcomes = []
    for tell, reader in ((told_message, claude), (told_response, gpt)):
        try:
            told: Said | None = tell(reader, name)  # type: ignore[operator]
        except Failed:
            told = None
        # Bytes that the proxy hasn't read yet are gone if the connection breaks.
        assert (told is not None) is whole or (whole and sent.broken), f"seed {seed}: {sent.body!r}"
        if told is not None:
            assert (told.thinking, told.text, told.calls) == (said.thinking, said.text, said.calls), f"seed {seed}"
            outcomes.append(told)
    if len(outcomes) < 2:
        return "error" if said.end == "error" else "cut"
    message, response = outcomes
    assert (message.end, response.end) == (STOPS[said.end], STATUSES.get(said.end, "completed")), f"seed {seed}"
    if said.usage is None:
        assert (message.usage, response.usage) == ((0, 0), None), f"seed {seed}"
    elif _has_usage(sent) and not sent.broken:
        assert message.usage == response.usage == said.usage, f"seed {seed}"
    return said.end


def _has_usage(sent: Sent) -> bool:
    """Return whether a stream wasn't cut before its usage."""
    return b'"total_tokens": 13}' in sent.body and len(sent.body.rsplit(b'"total_tokens": 13}', 1)[1]) > 2


@pytest.mark.parametrize("batch", range(BATCHES))
def test_streams_arrive_whole_or_end_with_an_error(front: Clients, batch: int, full: bool) -> None:
    ends: Counter[str] = Counter()
    for seed in range(batch, SEEDS_FULL if full else SEEDS, BATCHES):
        ends[check(front, seed)] += 1
    assert ends.keys() > {"stop", "tool_calls", "cut"}
