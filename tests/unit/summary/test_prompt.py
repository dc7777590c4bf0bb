"""Test the prompt for the summary model."""

from proxy.summary.prompt import request_messages


def test_a_policys_own_prompt_replaces_all_wording() -> None:
    template = "Sum up {messages} in {braces}."
    assert request_messages(["a {x}", "b"], max_tokens=9, template=template) == [
        {"role": "user", "content": "Sum up a {x}\n\nb in {braces}."}
    ]
    with_notes = request_messages(["a"], max_tokens=9, template=template, previous="old")
    assert with_notes[0]["content"] == "Sum up [notes on earlier messages] old\n\na in {braces}."
