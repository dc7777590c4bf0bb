"""Recognize summaries that other tools wrote.

A client that compacts its own conversation sends such a summary in place of older messages. The proxy merges it into
its next summary, so the text isn't quoted as a user message and isn't summarized twice. Only the beginning of a text
counts, so a quotation later in a message isn't recognized.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.compaction.format import ForeignSummary


@dataclass(frozen=True, slots=True)
class SummaryWording:
    """The wording of one tool's summary.

    - ``opening`` matches at the beginning of a text. The optional group ``before`` is the user's own text; ``note``
      belongs to the summary. Every repetition in the pattern is bounded.
    - ``closings`` are pairs: the beginning and the end of the tool's closing words. Without an end, they end with the
      line. Text after them is the user's.
    - ``parts_only`` means that the tool sends a list of parts. The opening is too common to be recognized in a string.
    - ``quotes`` are the tags around the user's own messages inside the summary.
    """

    tool: str
    roles: frozenset[str]
    opening: re.Pattern[str]
    closings: tuple[tuple[str, str], ...] = ()
    parts_only: bool = False
    quotes: tuple[str, str] | None = None


def _opening(pattern: str) -> re.Pattern[str]:
    return re.compile(r"\s{0,16}" + pattern, re.DOTALL)


_USER = frozenset({"user"})
_ANY = frozenset({"user", "assistant", "system", "developer"})
_TAG = ("</summary>", "</summary>")

# Each entry quotes the wording of a tool and names its source, as of November 2026.
WORDINGS = (
    # This project's summary_message.py: from another proxy in between, or a client that stored an outgoing request.
    SummaryWording(
        "compaction proxy",
        _ANY,
        _opening(r"<conversation_summary>\s{0,4}(?:The beginning of this conversation [^\n]{0,1000}\n{1,2})?"),
        (("</conversation_summary>", "</conversation_summary>"),),
        quotes=("<user_message>\n", "\n</user_message>"),
    ),
    # langchain-ai/langchain, libs/langchain_v1/langchain/agents/middleware/summarization.py, _build_new_messages;
    # also the JavaScript edition (summaryPrefix) and DeepAgents without a backend.
    SummaryWording("LangChain", _ANY, _opening(r"Here is a summary of the conversation to date:\s{0,4}")),
    # langchain-ai/deepagents, libs/deepagents/deepagents/middleware/summarization.py, _build_new_messages_with_path.
    SummaryWording(
        "DeepAgents",
        _USER,
        _opening(
            r"You are in the middle of a conversation that has been summarized\.\s{1,4}"
            r"(?P<note>The full conversation history has been saved to [^\n]{1,2000}\n)?\s{0,4}"
            r"A condensed summary follows:\s{1,4}<summary>\s{0,4}"
        ),
        (_TAG,),
    ),
    # Claude Code: closed source; from published session transcripts of 2025 and 2026, with and without the closing
    # sentences. Cline: cline/cline, src/core/prompts/contextManagement.ts, continuationPrompt.
    SummaryWording(
        "Claude Code, Cline",
        _USER,
        _opening(
            r"This session is being continued from a previous conversation that ran out of context\.\s{0,4}"
            r"(?:The summary below covers the earlier portion of the conversation\.|"
            r"The conversation is summarized below:)?\s{0,4}"
        ),
        (
            ("Continue the conversation from where it left off without asking", ""),
            (
                "Continue the conversation from where it left off without asking",
                "Do not greet the user or ask what to work on.",
            ),
            (
                "Please continue the conversation from where we",
                "Continue with the last task that you were asked to work on.",
            ),
            (
                "Please continue the conversation from where we",
                "you should indicate to the user that they will need to run this command again.",
            ),
        ),
    ),
    # openai/codex, codex-rs/core/templates/compact/summary_prefix.md.
    SummaryWording(
        "Codex CLI",
        _ANY,
        _opening(
            r"Another language model started to solve this problem and produced a summary of its thinking process\."
            r"[^\n]{0,600}?own analysis:\s{0,4}"
        ),
    ),
    # anomalyco/opencode, packages/core/src/session/runner/to-llm-message.ts.
    SummaryWording(
        "opencode",
        _USER,
        _opening(
            r"<conversation-checkpoint>\s{0,4}"
            r"(?:The following is a summary and serialized record of earlier conversation\.[^\n]{0,400}\n)?\s{0,4}"
        ),
        (("</conversation-checkpoint>", "</conversation-checkpoint>"),),
    ),
    # opencode 1.x and Kilo Code: packages/opencode/src/session/compaction.ts, SUMMARY_TEMPLATE: the assistant's answer,
    # all sections in this order.
    SummaryWording(
        "opencode 1",
        frozenset({"assistant"}),
        _opening(r"(?=## Goal\n(?>.{1,4000}?\n## Constraints & Preferences\n).{1,8000}?\n## Progress\n### Done\n)"),
    ),
    # NousResearch/hermes-agent, agent/context_compressor.py: SUMMARY_PREFIX, its earlier wordings, and the delimiters
    # of a summary merged into the message after it.
    SummaryWording(
        "Hermes",
        frozenset({"user", "assistant"}),
        _opening(
            r"(?:\[PRIOR CONTEXT — for reference only; not a new message\](?P<before>.{0,200000}?)"
            r"\[END OF PRIOR CONTEXT — COMPACTION SUMMARY BELOW\]\s{0,4})?"
            r"(?:\[CONTEXT COMPACTION(?: — REFERENCE ONLY)?\] Earlier turns [^\n]{0,4000}+\n|\[CONTEXT SUMMARY\]:)"
            r"\s{0,4}"
        ),
        (
            (
                "--- END OF CONTEXT SUMMARY — ",
                "--- END OF CONTEXT SUMMARY — respond to the message below, not the summary above ---",
            ),
        ),
    ),
    # google-gemini/gemini-cli, packages/core/src/services/chatCompressionService.ts; also Qwen Code.
    SummaryWording(
        "Gemini CLI",
        _USER,
        _opening(r"(?:<scratchpad>.{0,50000}?</scratchpad>\s{0,4})?<state_snapshot>\s{0,4}"),
        (("</state_snapshot>", "</state_snapshot>"),),
    ),
    # RooCodeInc/Roo-Code, src/core/condense/index.ts, and forks: the first of several text parts.
    SummaryWording("Roo Code", _USER, _opening(r"## Conversation Summary\n"), parts_only=True),
    # earendil-works/pi, COMPACTION_SUMMARY_PREFIX and _SUFFIX; also its forks.
    SummaryWording(
        "pi",
        _USER,
        _opening(
            r"The conversation history before this point was compacted into the following summary:\s{1,4}"
            r"<summary>\s{0,4}"
        ),
        (_TAG,),
    ),
)


def find_summary(role: str, texts: Sequence[str], *, listed: bool) -> ForeignSummary | None:
    """Return the summary in a message's texts and the user's own texts; ``None`` if no known tool wrote it.

    ``listed`` means that the texts are parts of a list. Only user messages have texts of the user. In a message of
    another role, text around the summary counts as part of it. An empty summary isn't recognized.
    """
    wordings = [one for one in WORDINGS if role in one.roles and (listed or not one.parts_only)]
    for place, text in enumerate(texts):
        wording = next((one for one in wordings if one.opening.match(text)), None)
        if wording is None:
            continue
        summary, beside = _split(wording, text)
        beside = [*texts[:place], *beside, *texts[place + 1 :]]
        if role != "user":
            summary = "\n\n".join([summary, *beside])
            beside = []
        kept = tuple(words for words in (text.strip() for text in beside) if words)
        return ForeignSummary(wording.tool, summary.strip(), kept) if summary.strip() else None
    return None


def _split(wording: SummaryWording, text: str) -> tuple[str, list[str]]:
    """Return the summary in a text of this wording, and the user's own texts."""
    opening = wording.opening.match(text)
    if opening is None:
        raise ValueError("the text has another wording")
    found = opening.groupdict()
    end, after = _closing(wording, text, opening.end())
    summary = text[opening.end() : end]
    words = [found.get("before") or ""]
    if wording.quotes:
        summary, quoted = _unquoted(summary, *wording.quotes)
        words += quoted
    return (found.get("note") or "") + summary, [*words, text[after:]]


def _closing(wording: SummaryWording, text: str, start: int) -> tuple[int, int]:
    """Return the start and end of the tool's closing words after ``start``; the text's end if there are none.

    The last occurrence counts, because a summary may quote the closing words of an earlier summary.
    """
    closings = [(len(text), len(text))]
    for first, last in wording.closings:
        place = text.rfind(last or first, start)
        if place >= 0:
            line = text.find("\n", place) if not last else -1
            after = place + len(last) if last else line if line >= 0 else len(text)
            begin = text.rfind(first, start, after)
            closings.append((place if begin < 0 else begin, after))
    return max(closings[1:] or closings, key=lambda closing: closing[1])


def _unquoted(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    """Remove the quotes between the tags. Return the remaining text and the quotes.

    If the last quote repeats an earlier one, it's dropped.
    """
    first, *pieces = text.split(begin)
    outside = [first]
    quoted = []
    for piece in pieces:
        inside, tag, rest = piece.partition(end)
        outside.append(rest if tag else begin + piece)
        if tag:
            quoted.append(inside)
    if quoted and quoted[-1] in quoted[:-1]:
        quoted.pop()
    return "".join(outside), quoted
