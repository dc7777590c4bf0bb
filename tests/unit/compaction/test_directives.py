"""Test rules of users, reminders of clients, and pins of policies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.directives import ENOUGH, LONGEST, MOST, SAID, directives, heaviest, rule_lines
from proxy.compaction.effects import COUNTER, note_key, split_notes
from proxy.compaction.rules import NotSearchable, Pins
from tests.kit.conversations import FORMAT, assistant, call, result, turns, user

RULES = [
    "Never push to the main branch.",
    "Always answer in French, please.",
    "From now on, use tabs.",
    "Before you delete a file, ask me.",
    "Actually, the port is 8081, not 8080.",
    "I'd prefer short answers without headings.",
    "Don’t mention my employer.",
    "We must not exceed the budget of 5,000.",
    "All of this has to be done by Monday, not later.",
]
NO_RULES = [
    "The build finished in 12 seconds.",
    "src/app/main.py:12: undefined name 'parse'",
    "2026-11-25 10:00:01 INFO server listening on port 8080",
    "    if not self._rules:",
    "return [x for x in every if not x.only]",
    '{"never": true, "always": ["must"]}',
    "Here is the log of the last run:",
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "form", ["{}", "Some text first. {}", "- {}", "12. {}", "> {}", "    34→- {}", "  7\t{}", "# {}"]
)
def test_a_rule_is_found_word_for_word(rule: str, form: str) -> None:
    text = f"The log is below.\n{form.format(rule)}\nAll tests passed."
    assert directives(text, ENOUGH)[rule] >= ENOUGH


@pytest.mark.parametrize("text", NO_RULES)
def test_other_lines_are_not_rules(text: str) -> None:
    assert directives(text, ENOUGH) == {}


# Two rules each of four kinds: never, always or only, not allowed, and an order not to do something.
LANGUAGES = {
    "en": ["Never touch schema.sql.", "Do not send mail without a yes."],
    "es": ["Responde siempre así.", "No debes usar la rama."],
    "de": ["Ändere nie die Datei.", "Versende keine Mails bitte."],
    "fr": ["Réponds toujours ainsi.", "Tu ne dois pas l'utiliser."],
    "pt": ["Nunca altere o arquivo.", "Não envie nada sem aviso."],
    "it": ["Rispondi sempre così.", "Non devi usare il ramo."],
    "nl": ["Wijzig dit bestand nooit.", "Stuur geen mail zonder ja."],
    "pl": ["Używaj tylko tabulatorów.", "Nie wolno tego używać."],
    "ru": ["Никогда не меняй файл.", "Не отправляй письма."],
    "tr": ["Yalnızca sekme kullan.", "Dalı kullanmamalısın."],
    "ar": ["لا تعدّل الملف أبدًا.", "لا ترسل رسائل بدون موافقة."],
    "hi": ["हमेशा तीन वाक्यों में उत्तर दें।", "शाखा का उपयोग न करें।"],
    "zh": ["绝对不要改这个文件。", "不要发邮件。"],
    "ja": ["必ず三文で答えてください。", "そのブランチは使わないこと。"],
    "ko": ["파일은 절대 수정하지 마세요.", "승인 없이 보내지 마세요."],
}
OTHER_SENTENCES = [
    "¿Por qué falla la prueba de red?",
    "Der Build ist nicht durchgelaufen.",
    "Je ne sais pas pourquoi.",
    "Nie wiem dlaczego.",
    "Не знаю, почему.",
    "नेटवर्क मॉड्यूल विफल हो गया।",
    "動かないことがある。",
]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("form", ["{}", "The build is slow. {} It is late.", "构建很慢。{}", "- {}"])
def test_rules_of_users_in_other_languages_are_found(language: str, form: str) -> None:
    for rule in LANGUAGES[language]:
        assert rule in directives(form.format(rule))


@pytest.mark.parametrize("text", OTHER_SENTENCES)
def test_other_sentences_in_these_languages_are_not_rules(text: str) -> None:
    assert directives(text) == {}


def test_a_wrapped_sentence_is_one_rule() -> None:
    rule = "Never change the files below the folder with the generated\ncode without asking me."
    assert rule in directives(f"# Rules\n- {rule}\n- Use tabs.\nx = 1")
    # Short lines aren't wrapped.
    assert list(directives("Never use tabs\nalways use spaces")) == ["Never use tabs", "always use spaces"]


def test_the_heaviest_rules_that_fit_stay_in_order() -> None:
    text = "Use tabs here.\nNever, under any circumstances, push to main.\nPlease keep my name out of it."
    assert rule_lines(text, 1000) == text.split("\n")
    assert rule_lines(text, 50) == [text.split("\n")[1]]
    assert rule_lines(text, 7) == []
    assert heaviest({"a": 1, "b": 3, "c": 2}, 2, len) == ["b", "c"]


def test_of_a_huge_text_both_ends_are_searched() -> None:
    filler = "The build is green.\n" * (MOST // 20)
    found = directives(f"Never push.\n{filler}Never pull.\n{filler}Never fetch.")
    assert list(found) == ["Never push.", "Never fetch."]


@pytest.mark.parametrize(
    "piece", ["", "a", "\n", " ", "1", ". ", "* ", '."\t', "don't ", ", ", "never, ", "x" * 60 + "\n", "\ud800", "## "]
)
def test_the_time_is_linear_for_any_text(piece: str) -> None:
    # A quadratic search of a megabyte would take minutes and reach the limit for each test.
    text = piece * (1_000_000 // max(1, len(piece)))
    assert all(len(rule) <= LONGEST for rule in directives(text))


@given(st.lists(st.sampled_from([*RULES, *NO_RULES, "\n", " ", "- ", "x" * 80, '."', "\u2028", "\ud800", "é", "。"])))
def test_rules_are_parts_of_the_text(pieces: list[str]) -> None:
    for joint in ("", "\n", " "):
        text = joint.join(pieces)
        found = directives(text)
        assert all(rule in text and rule == rule.strip() for rule in found)
        assert all(weight >= SAID for weight in found.values())
        assert list(directives(text, ENOUGH)) == [rule for rule, weight in found.items() if weight >= ENOUGH]
        room = len(text) // 2
        lines = rule_lines(text, room)
        assert set(lines) <= set(found)
        assert sum(len(line) + 1 for line in lines) <= room


@given(st.text())
def test_any_text_can_be_searched(text: str) -> None:
    assert all(rule in text for rule in directives(text))


A, B = "<system-reminder>\nRule A.\n</system-reminder>", "<system_reminder>Rule B.</system_reminder>"
CONTEXT = "# AGENTS.md instructions for /w\n\n<INSTRUCTIONS>\nBe brief.\n</INSTRUCTIONS>"


@pytest.mark.parametrize(
    ("text", "notes", "rest"),
    [
        ("Go on.", [], "Go on."),
        (f"{A}\n\n{B}", [A, B], ""),
        (f"{A}\nGo on.\n\n{B}\n", [A, B], "Go on."),
        (f"The tag {A}", [], f"The tag {A}"),
        (f"{A} Go on.", [A], "Go on."),
        ("<system-reminder>open", [], "<system-reminder>open"),
        ("open</system-reminder>", [], "open</system-reminder>"),
        (CONTEXT, [], CONTEXT),
    ],
)
def test_reminders_at_both_ends_are_split_off(text: str, notes: list[str], rest: str) -> None:
    assert split_notes(text) == (notes, rest)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Today's date is 2026-11-28.", "Today's date is 2026-11-29.", True),
        ("12% of the context is left.", "11% of the context is left.", True),
        ("Rule A.", "Rule  A.", True),
        ("Rule A.", "Rule B.", False),
        ("Read src/v1/a.py first.", "Read src/v2/a.py first.", False),
        ("Tools:\nA\nB 1", "Tools:\nA\nB 2", False),
    ],
)
def test_equal_reminders_have_one_key(one: str, other: str, same: bool) -> None:
    keys = [note_key(f"<system-reminder>\n{text}\n</system-reminder>") for text in (one, other)]
    assert (keys[0] == keys[1]) is same


@pytest.mark.parametrize("text", ["<total_tokens>149000 tokens left</total_tokens>", "Token usage: 12345/200000"])
def test_a_line_that_counts_is_a_counter(text: str) -> None:
    assert note_key(f"<system-reminder>{text}</system-reminder>").startswith(COUNTER)


BODY = turns([user("KEEP this"), assistant(None, call("a", "read_file", path="src/KEEP.py")), result("a", "other")])


def test_without_patterns_no_message_is_pinned() -> None:
    assert Pins().among(BODY, FORMAT) == frozenset()
    assert not Pins().holds(BODY[0], FORMAT)


def test_a_lone_surrogate_is_searched_too() -> None:
    assert Pins(("KEEP",)).holds(turns([user("\ud800 KEEP")])[0], FORMAT)


def test_an_unsupported_expression_is_rejected() -> None:
    with pytest.raises(NotSearchable):
        Pins((r"(a)\1",))
