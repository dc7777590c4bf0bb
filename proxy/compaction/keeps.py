"""What a prompt keeps: the share or the limit of each part, and what more of it costs.

Only this module has such numbers, besides the defaults of a policy's settings. If you change one, or the form of the
summary message, raise ``PROMPT_VERSION`` in ``proxy/pipeline/job.py``. A test fails otherwise.
"""

from __future__ import annotations

# Shares of the budget. More of any part leaves less room to grow, so the next checkpoint comes earlier. With `keep` at
# 0.10, a conversation restarts at about 0.27 of the budget and grows by 0.58 until the trigger at 0.85.
SUMMARY_SHARE = 0.05  # the summary. More facts, but its writer takes longer
USER_SHARE = 0.06  # the user's earlier messages and rules that were read. More exact words, but most are done with
NEWEST_SHARE = 0.30  # the newest user or system message. The task stays whole, but a pasted file may take all of it
SYSTEM_SHARE = 0.10  # system messages inside the conversation, newest first. More orders, but many repeat
WORDS_SHARE = 0.02  # the assistant's last text. Its train of thought, but the summary has most of it
INDEX_SHARE = 0.045  # the index. More exact names, but the last ones are rarely needed
PLAN_SHARE = 0.03  # the newest plan, if it's in the summarized part. More open steps, but also finished ones

# Shares of the room that head and tools leave.
STATE_SHARE = 0.35  # tools, settings, and standing reminders. With 0.20, a window of 12K lost loaded tools
GROUP_SHARE = 0.50  # the newest exchange. Its results stay whole, but nothing before them might fit

# Tokens in any window, for parts that don't become better with more.
MOST_SYSTEM = 20_000  # system messages, if there is neither a budget nor a trigger in tokens
MOST_WORDS = 2_000  # the assistant's last text
MOST_PLAN = 2_000  # the newest plan
MOST_STATE_PARTS = 500  # parts that are in effect, not tokens. Beyond it, the oldest end

# One part in so many of another number.
SPAN_SUMMARY_DIVISOR = 2  # of the replaced tokens: the summary. With more, compaction would hardly gain
SPAN_DIVISOR = 8  # of the replaced tokens: each of the last text, the index, and the plan
FIRST_MESSAGE_DIVISOR = 3  # of the user's tokens: the first message, which states the goal. The rest is for the newest
EXTRACT_DIVISOR = 2  # of an extract: earlier notes, and of the rest, system messages. The other half is for new steps
LARGE_HEAD_DIVISOR = 3  # of the budget: head and tools beyond it let a conversation grow to a share of the rest
LEAST_ROOM_DIVISOR = 8  # of the budget: the room that parts share, even if head and tools leave less
STRICT_DIVISOR = 64  # of the budget: free for messages that strict alternation inserts. With less, they may not fit
BYTE_MARGIN_DIVISOR = 64  # of the limit on bytes: free, because cuts are made by tokens and their bytes aren't exact

# When to compact, and how far. More room to grow means fewer checkpoints, but each keeps less.
USUAL_TRIGGER = 0.85  # of the budget: the trigger that the shares assume
ROOM_TO_GROW = 0.65  # of the trigger's level: the most after a checkpoint, which invalidates the prompt cache
LEAST_GAIN = 0.10  # of a request: what a compaction must save. With less, the cache is lost for little
FULL = 0.95  # of the budget: any gain is enough, because the upstream may refuse the next turn
PRESSING = 0.95  # of a limit on messages or bytes: compact, because the upstream may refuse the next turn
NEARING = 0.85  # of such a limit: prepare the summary, if the policy prepares summaries
ROOM = 0.60  # of such a limit: the most after a compaction

# The user's words in the summary message.
RULES_PART = 0.4  # of the user's tokens: rules from messages that don't fit. More rules, but fewer whole messages
FILES_PART = 0.25  # of the user's tokens: rules in files with instructions, which agents can read again
SHORT_MESSAGE = 500  # tokens of a message that isn't shortened to make room for older ones
SMALLEST_QUOTE = 24  # tokens. With less room, no part of a text is quoted, because a shorter one says nothing
RARE_PART = 0.08  # of the index: names that a model can't guess, even if they occurred once. Fewer of the usual ones
READ_WEIGHT = 1  # of each occurrence in a file's content that a name belongs to this file
WRITTEN_WEIGHT = 3  # the same in a change. With more, a name belongs to a file that only uses it
DEFINED_WEIGHT = 12  # occurrences for which a definition counts. More helped the project it was fitted to, not others
LONG_INDEX = 1_000  # tokens of an index that repeats names which the prompt has without their files
NOTES_PART = 0.5  # of the room for what's in effect: reminders, if they and the tools don't fit
LEAST_NOTE = 60  # tokens of a reminder. If less of each fits, the oldest ones end

# Shortened texts.
HEAD_PART = 0.6  # of the kept text: its beginning, which states the subject. The rest is the end, with the result
NOTABLE_PART = 0.3  # of the kept text: notable lines from the middle, which interrupt the text at both ends
NOTABLE_LINES = 8  # of them, because a log repeats its failures
NOTABLE_CHARACTERS = 240  # of each of them
NAMES_PART = 0.5  # of the kept text: names from the middle. In 64K, 82 % of the identifiers needed next stay, not 73 %
PROGRAM_NAMES_PART = 0.8  # the same of a program that was read, if it has so many. It often begins with imports only
READ_NAMES_PART = 0.25  # of an outdated read: its names. They help to find the place again, but the content misleads
READ_NAMES_CHARACTERS = 2_000  # of these names at most
READ_AGAIN_PART = 0.9  # of a read's length: a later read of the file must have it, because some tools only refer back
RESULT_PART = 0.25  # of a result's limit: a shortened one. More of each result, but fewer messages fit
LEAST_LOSSLESS = 200  # tokens of a result that gets another form. Shorter ones would hardly save anything
KEPT_CHARACTERS = 120  # of a cut argument. DeepAgents keeps 20, which shows less of a file's purpose
SMALLEST_RESULT = 200  # tokens. Oversized results aren't shortened below it, even if the exchange is then too large
SPARED_CHARACTERS = 8_000  # of reminders at the end of a result that is shortened. Longer ones are cut with it
LEAST_TEXT = 32  # tokens of a user's or assistant's text, even beyond the limit, so that it's never only a note
FIT_ARGUMENT = 400  # characters of an argument when a request is still too large
FIT_TOKENS = 120  # tokens of a message that isn't shortened even then
FIT_BYTES = 600  # bytes of such a message, when bytes are over the limit

# What the writer of a summary reads, in characters. More lets it find more, but takes more time and money.
RESULT_CHARACTERS = 6_000
ARGUMENT_CHARACTERS = 2_000
TEXT_CHARACTERS = 40_000  # almost all messages stay whole
SAMPLED_MESSAGES = 4  # the newest user messages, which show the language
SAMPLE_CHARACTERS = 60  # at each end of them

# An extract, the summary that no model writes, in characters. Longer steps mean fewer of them.
EXTRACT_TEXT = 400
EXTRACT_ARGUMENT = 160
EXTRACT_RESULT = 120

# Tokens of fixed text, measured with a margin. More is only wasted; with less, a part exceeds its limit.
SUMMARY_FRAME_TOKENS = 220  # the summary message
USER_FRAME_TOKENS = 12  # the tags of a user's message in it
LABEL_TOKENS = 24  # the label for the media of such a message
OMITTED_FRAME_TOKENS = 20  # the line with the number of omitted messages
INDEX_FRAME_TOKENS = 12  # the index's title and the line breaks around it
PLAN_FRAME_TOKENS = 16  # the plan's title and the line breaks around it
