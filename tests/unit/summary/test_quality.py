"""Test the checks of a model's summary."""

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


@pytest.mark.parametrize("before", ["", "Now, ", "OK. First, "])
@pytest.mark.parametrize("end", [":", ".", "：", " and run its tests."])
@pytest.mark.parametrize(
    "does", ["let me read {}", "I'll look at {}", "I’m going to check {}", "让我看看 {}", "Ich prüfe {}"]
)
def test_what_the_model_does_next_is_rejected(before: str, does: str, end: str) -> None:
    # maka#3029: such a sentence became the notes of 742 messages.
    text = before + does.format("src/retry_7.ts") + end
    transcript = "[user] Fix the loop in src/retry_7.ts and its tests, and let me know.\n" * 90
    with pytest.raises(SummaryRejected, match="went on with the work"):
        checked(Written(text, "stop"), transcript=transcript, source_tokens=3_000, max_tokens=50, count=words)
    for notes in (
        f"State: src/retry_7.ts is read. Next step: {text}",
        f"{text}\nGoal: fix the loop in src/retry_7.ts.",
    ):
        checked(Written(notes, "stop"), transcript=transcript, source_tokens=3_000, max_tokens=50, count=words)


@pytest.mark.parametrize("bar", ["｜", "｜｜", "|", "||"])
@pytest.mark.parametrize("words", ["", "I look at the files first.\n", "```\n"])
def test_a_call_between_bars_is_rejected(bar: str, words: str) -> None:
    # ds4#591, openseek#443, opencode#27758: calls of DeepSeek as text, with the bars of its token or plain ones.
    call = f'<{bar}DSML{bar}invoke name="bash">\n<{bar}DSML{bar}parameter name="command">ls</{bar}DSML{bar}parameter>'
    calls = f"<{bar}DSML{bar}tool_calls>\n{call}\n</{bar}DSML{bar}invoke>\n</{bar}DSML{bar}tool_calls>"
    begun = (
        f"<{bar}tool_calls_begin{bar}><{bar}tool_call_begin{bar}>bash<{bar}tool_sep{bar}>{{}}<{bar}tool_calls_end{bar}>"
    )
    for text in (calls, call, begun):
        with pytest.raises(SummaryRejected, match="called a tool"):
            check(words + text)
        notes = f"Goal: parse {text.splitlines()[0]} in the server.\nNext: run the tests of the parser."
        assert check(notes, source=400) == notes


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


NOTES = "Goal: fix the tests in /srv/app. State: m21.py was read."
HM = "They want notes.\nGoal: hm, /srv/app?"


@pytest.mark.parametrize(
    "thoughts",
    [
        f"<THINK>{HM}</THINK>",
        f'<reasoning effort="high">\n{HM}\n</reasoning>\n',
        f"◁think▷{HM}◁/think▷",
        f"<seed:think><seed:cot_budget>x</seed:cot_budget>{HM}</seed:think>",
        f"<|start|>assistant<|channel|>analysis<|message|>{HM}<|end|><|start|>assistant<|channel|>final<|message|>",
        f"<|channel>thought\n{HM}<channel|>",
        f"<unused94>thought\n{HM}<unused95>",
        f"Thinking…\n{HM}\n…done thinking.\n\n",
        f"```\n<think>{HM}</think>\n```\n",
        "They want notes.</think>\n",
        f"<think>a<think>b</think>{HM}</think>",
        f"<think></think>\n<thought>{HM}</thought>\n",
        f"<|begin_of_thought|>{HM}<|end_of_thought|>",
        f"<｜think｜>{HM}<｜/think｜>",
        f"<assistant_musings>{HM}</assistant_musings>",
        "## Reasoning\nThey want notes.\n\n",
    ],
)
def test_notes_behind_thoughts_of_any_form_are_kept(thoughts: str) -> None:
    assert check(thoughts + NOTES, source=5000, most=900) == NOTES


TRANSCRIPT = """\
[user] The nightly job of our billing service fails since Tuesday. Fix it, but never touch the table invoices.
[assistant] Two workers lock accounts in a different order. I'll sort the ids in billing/settle.py.
[assistant calls bash] {"command": "pytest tests/test_settle.py"}
[tool result] 14 passed, 1 failed: test_refund_rounding
[user Maria] Rounding is FIN-882, leave it. Can you disable the audit log?
[assistant] I can't, because the compliance rules require it.
[user] 请把登录页的按钮改成蓝色，并修复付款超时。"""


def told(text: str, transcript: str = TRANSCRIPT) -> str:
    return checked(
        Written(text, "stop"),
        transcript=transcript,
        source_tokens=5_000,
        max_tokens=2_000,
        count=lambda text: len(text),
    )


OFFER = " There are other ways in which I could be useful, such as a checklist, a plan, or a review of the wording." * 5


@pytest.mark.parametrize(
    "text",
    [
        "I won't be writing these notes." + OFFER,
        "I want to be direct with you: I'm not going to carry this forward." + OFFER,
        "Let me be straightforward: this is something that I have to pass on.",
        "We cannot process your message at this time.",
        "Sorry! Let's talk about something else.",
        "Zu solchen Inhalten erstelle ich keine Zusammenfassung, weil sie Menschen schaden könnten.",
        "Je préfère ne pas résumer cet échange : il décrit des actes illégaux.",
        "Me temo que no puedo hacer eso.",
        "Não me sinto confortável em resumir este material.",
        "Non mi è consentito riassumere questo contenuto.",
        "这个话题我不方便讨论。",
        "その内容を要約することはできません。",
        "Я не стану пересказывать этот разговор.",
        "Üzgünüm, bu konuda yardımcı olamam.",
        "No response requested.",
        "了解しました。",
    ],
)
def test_a_text_about_itself_is_no_summary(text: str) -> None:
    with pytest.raises(SummaryRejected, match="refused"):
        told(text)


@pytest.mark.parametrize(
    "text",
    [
        "The user asked me to disable the audit log; I said I can't.",
        "I can't disable the audit log, as compliance forbids it. Sorted the ids in billing/settle.py; FIN-882 stays.",
        "The assistant can't disable the audit log. The user accepted that.",
        "They fixed the job. We left rounding to Maria.",
        "登录页按钮改成蓝色，付款超时待修复。",
        "billing/settle.py の修正済み。",
        "Goal: fix it.",
        "Summary: the work went on; files were changed and tests were run. Next step: continue.",
    ],
)
def test_terse_notes_and_notes_about_a_refusal_are_notes(text: str) -> None:
    assert told(text) == text


@pytest.mark.parametrize(
    "text", ["Error generating summary: litellm: 429 Too Many Requests", "Failed to generate summary."]
)
def test_an_error_about_the_summary_is_an_error(text: str) -> None:
    with pytest.raises(SummaryRejected, match="error"):
        told(text)
