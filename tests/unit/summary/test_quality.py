"""Test the checks of a model's summary."""

from __future__ import annotations

import pytest

from proxy.summary.quality import SummaryRejected, Written, checked, notes_in
from tests.kit.summary_conversation import words


def check(text: str, *, source: int = 100, most: int = 50, reason: str | None = "stop", refused: bool = False) -> str:
    return checked(Written(text, reason, refused), transcript="", source_tokens=source, max_tokens=most, count=words)


def test_a_good_one_comes_back_trimmed() -> None:
    assert check("\n The build was fixed. \n") == "The build was fixed."


@pytest.mark.parametrize(
    "text",
    ["", "  \n\t ", "I'm sorry, but I can't help with that.", "I’m unable to do this.", "**I cannot assist** with it",
     "As an AI model I have no notes.", "Sorry, no."],
)  # fmt: skip
def test_nothing_and_refusals_are_rejected(text: str) -> None:
    with pytest.raises(SummaryRejected):
        check(text)


@pytest.mark.parametrize(
    "text",
    ["I apologize, but I must decline.", "I won't do that.", "Unfortunately, I cannot read this.",
     "I do not see a transcript.",
     "Please provide the transcript.",
     "<think>They ask for notes.</think>I'm sorry, I can't."],
)  # fmt: skip
def test_refusals_in_other_words(text: str) -> None:
    with pytest.raises(SummaryRejected, match="refused"):
        check(text)


@pytest.mark.parametrize(
    "text",
    ['{"error": {"message": "overloaded", "type": "server_error"}}', '{"detail": "Not Found"}',
     '```json\n{"error": "x"}\n```',
     '{"message": "Too many requests", "code": 429}', "Error code: 429 - {'error': {'message': '" + "x" * 2000 + "'}}",
     "Rate limit reached for gpt-4o. Try again in 20s.", "litellm.RateLimitError: quota",
     "openai.APITimeoutError: timed out",
     "HTTP 502 Bad Gateway", "503 Service Unavailable", "429: Too Many Requests", "Internal Server Error",
     "Error: timeout",
     "You exceeded your current quota, please check your plan.", "Invalid API key provided.",
     "The model is overloaded.",
     "An error occurred while processing your request.", "<html><body>Bad gateway</body></html>",
     "<!DOCTYPE html>\n<html>",
     "Traceback (most recent call last):\n  File x", "Request timed out."],
)  # fmt: skip
def test_the_text_of_an_error_is_rejected(text: str) -> None:
    with pytest.raises(SummaryRejected, match="error"):
        check(text, source=3000)


@pytest.mark.parametrize(
    "text",
    ['{"name": "read_file", "arguments": {"path": "a.py"}}', '[{"name": "ls", "parameters": {}}]',
     '<tool_call>\n{"name": "ls"}\n</tool_call>', "<function=ls></function>", "[TOOL_CALLS] ls", '{"tool_calls": []}'],
)  # fmt: skip
def test_a_call_written_as_text_is_rejected(text: str) -> None:
    with pytest.raises(SummaryRejected, match="called a tool"):
        check(text)


@pytest.mark.parametrize(
    ("reason", "said"),
    [("length", "truncated"), ("max_tokens", "truncated"), ("MAX_TOKENS", "truncated"), ("tool_calls", "called"),
     ("content_filter", "refused"), ("error", "refused")],
)  # fmt: skip
def test_how_it_ended_decides(reason: str, said: str) -> None:
    with pytest.raises(SummaryRejected, match=said):
        check("The build was fixed.", reason=reason)
    for fine in ("stop", "end_turn", "eos", None):
        assert check("The build was fixed.", reason=fine)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>They want\nnotes.</think>\n\nGoal: x", "Goal: x"),
        ("\n<Thinking>a</Thinking><reasoning>b</reasoning> Goal: x", "Goal: x"),
        ("They want notes.\n</think>\n\nGoal: x", "Goal: x"),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Goal: x<|return|>",
            "Goal: x",
        ),
        ("Goal: parse <|channel|>final<|message|> too", "Goal: parse <|channel|>final<|message|> too"),
        ("Goal: fix how <think> and </think> are parsed.", "Goal: fix how <think> and </think> are parsed."),
    ],
)
def test_thoughts_are_no_part_of_it(text: str, left: str) -> None:
    assert check(text) == left


@pytest.mark.parametrize("text", ["<think>Only thoughts.</think>", "<think>Never ending", "Only thoughts.\n</think>\n"])
def test_thoughts_alone_are_nothing(text: str) -> None:
    with pytest.raises(SummaryRejected, match="empty"):
        check(text)


def test_thoughts_do_not_count_towards_the_size() -> None:
    assert (
        check("<think>" + "word " * 500 + "</think>The build was fixed.", source=10, most=5) == "The build was fixed."
    )


@pytest.mark.parametrize(
    "text",
    ["Goal: fix the rate limit error 429 in the client.",
     "1. Goal: the user wants no refusals.\n2. State: Error: none.",
     '{"goal": "fix it", "errors": ["429 in a.py"], "next": "run tests"}', "The server was moved to port 8080.",
     "500 rows were imported; the rest follows.", "Upstream is github.com/acme/x, branch main.", "目标：修复构建。",
     "Leider ist der Build rot; als Nächstes a.py.", "Error handling was added to a.py.\nNext: tests."],
)  # fmt: skip
def test_notes_about_errors_are_notes(text: str) -> None:
    assert check(text) == text


def test_long_notes_that_begin_with_a_users_apology_are_no_refusal() -> None:
    text = "I'm sorry was what the user said first. " + "Then the work went on. " * 20
    assert check(text, source=1000, most=500) == text.strip()


def test_what_was_broken_off_refused_or_no_smaller_than_its_source_is_rejected() -> None:
    with pytest.raises(SummaryRejected, match="truncated"):
        check("The build", reason="length")
    with pytest.raises(SummaryRejected, match="refused"):
        check("The build was fixed.", refused=True)
    assert check("word " * 49, source=50)
    with pytest.raises(SummaryRejected, match="isn't smaller"):
        check("word " * 50, source=50)


def test_what_is_over_the_cap_keeps_its_first_lines_whole() -> None:
    assert check("one two three\nfour five\nsix seven eight", most=7) == "one two three\nfour five"
    with pytest.raises(SummaryRejected, match="one line"):
        check("word " * 60, most=20)


def test_the_reason_never_quotes_the_text() -> None:
    with pytest.raises(SummaryRejected) as caught:
        check("I'm sorry about SECRET")
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("<notes>\nGoal: x.\n</notes>", "Goal: x."),
        ("<think>I write <notes></think>\nHere:\n<notes>Goal: </notes>.</notes>", "Goal: </notes>."),
        ("", ""),
        ("<think>Hm.</think>", "<think>Hm.</think>"),
    ],
)
def test_notes_are_between_their_tags(text: str, notes: str) -> None:
    assert notes_in(Written(text, "stop")) == Written(notes, "stop")


@pytest.mark.parametrize("text", ["I fixed the next file.", "<notes>Goal:", "</notes><notes>", "PINEAPPLE"])
def test_a_response_without_notes_is_rejected(text: str) -> None:
    with pytest.raises(SummaryRejected, match="didn't write notes"):
        notes_in(Written(text, "stop"))


@pytest.mark.parametrize(
    "text",
    ["[assistant] Reading file 99\n[tool result] def login()", "[assistant calls read] {}", "[tool result] ok",
     "## Goal\n(none - empty conversation)\n\n## Constraints\n- (none)\n\n## Next\n1. Await a request"],
)  # fmt: skip
def test_a_continued_transcript_and_placeholders_are_no_notes(text: str) -> None:
    with pytest.raises(SummaryRejected):
        checked(
            Written(text, "stop"),
            transcript="",
            source_tokens=1_000,
            max_tokens=500,
            count=lambda text: len(text.split()),
        )


def test_notes_may_have_a_placeholder() -> None:
    text = "## Goal\nFix the tests in /srv/app.\n## Constraints\n(none)\n## State\n- [done] read m1.py"
    notes = checked(
        Written(text, "stop"), transcript="", source_tokens=1_000, max_tokens=500, count=lambda text: len(text.split())
    )
    assert notes == text


def test_a_summary_may_quote_the_transcript() -> None:
    quoted = "[user] Fix the tests of OPS-4711."
    written = Written(quoted, "stop")
    transcript = f"{quoted} Never touch users.\n[tool result] ok"
    assert checked(written, transcript=transcript, source_tokens=100, max_tokens=50, count=words) == quoted


NOTES = "Goal: fix the tests in /srv/app. State: m21.py was read."
HM = "They want notes.\nGoal: hm, /srv/app?"


@pytest.mark.parametrize(
    "thoughts",
    [
        f"<THINK>{HM}</THINK>",
        f'<reasoning effort="high">\n{HM}\n</reasoning>\n',
        f"[THINK]{HM}[/THINK]",
        f"◁think▷{HM}◁/think▷",
        f"<seed:think><seed:cot_budget>x</seed:cot_budget>{HM}</seed:think>",
        f"<|channel|>analysis<|message|>{HM}<|end|><|start|>assistant<|channel|>final<|message|>",
        f"<|start|>assistant<|channel|>analysis<|message|>{HM}<|end|><|start|>assistant<|channel|>final<|message|>",
        f"analysisHm. {HM}assistantfinal",
        f"<|channel>thought\n{HM}<channel|>",
        f"<unused94>thought\n{HM}<unused95>",
        f"Thinking...\n{HM}\n...done thinking.\n\n",
        f"Thinking…\n{HM}\n…done thinking.\n\n",
        f"```thinking\n{HM}\n```\n",
        f"```\n<think>{HM}</think>\n```\n",
        "They want notes.</think>\n",
        "They want notes.\n</THINKING>\n",
        f"<think>a<think>b</think>{HM}</think>",
        f"<think></think>\n<thought>{HM}</thought>\n",
        f"<think>{HM}</think>\n</think>\n",
        f"<|begin_of_thought|>{HM}<|end_of_thought|>",
        f"<|START_THINKING|>{HM}<|END_THINKING|>",
        f"<｜think｜>{HM}<｜/think｜>",
        f"<assistant_musings>{HM}</assistant_musings>",
        f"<!-- {HM} -->\n",
        "## Reasoning\nThey want notes.\n\n",
        f'<details type="reasoning">\n<summary>Thought for 3 s</summary>\n> {HM}\n</details>\n',
    ],
)
def test_notes_behind_thoughts_of_any_form_are_kept(thoughts: str) -> None:
    assert check(thoughts + NOTES, source=5000, most=900) == NOTES


@pytest.mark.parametrize("opening", ["<think>", "<|channel|>analysis<|message|>", "[THINK]", "◁think▷", "<seed:think>"])
def test_thoughts_that_never_end_are_nothing(opening: str) -> None:
    with pytest.raises(SummaryRejected, match="empty"):
        check(opening + HM, source=5000, most=900)


@pytest.mark.parametrize(
    "text",
    [
        "<objective>Fix it</objective>\n<todo>m3.py</todo>",
        "[planned] m4.py\n[done] m3.py",
        "<plan>Read m4.py",
        "<Button> is fixed.",
    ],
)
def test_notes_in_tags_are_notes(text: str) -> None:
    assert check(text) == text


def test_words_after_a_call_are_no_notes() -> None:
    with pytest.raises(SummaryRejected, match="called a tool"):
        check('<acme:tool_call>{"name": "ls"}</acme:tool_call>\nThen a.py.')
