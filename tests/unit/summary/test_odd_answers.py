"""Answers of summary models in every notation: calls and refusals are rejected, and notes come without reasoning."""

import json

import pytest

from proxy.summary.quality import SummaryRejected, Written, checked

TRANSCRIPT = """\
[user] The nightly job of our billing service fails since Tuesday. Fix it, but never touch the table invoices.
[assistant] Two workers lock accounts in a different order. I'll sort the ids in billing/settle.py.
[assistant calls bash] {"command": "pytest tests/test_settle.py"}
[tool result] 14 passed, 1 failed: test_refund_rounding
[user Maria] Rounding is FIN-882, leave it."""

NOTES = """\
Goal: fix the nightly job; never touch invoices.
State: ids are sorted in billing/settle.py.
Next: FIN-882 stays."""
HM = "They want notes.\nGoal: hm, the nightly job in billing/settle.py?"
COMMAND = "pytest tests/test_settle.py"
ARGS = json.dumps({"command": COMMAND})


def told(text: str) -> str:
    written = Written(text, "stop")
    return checked(written, transcript=TRANSCRIPT, source_tokens=5_000, max_tokens=2_000, count=lambda text: len(text))


CALLS = [
    f'<tool_call>\n{{"name": "bash", "arguments": {ARGS}}}\n</tool_call>',
    f'<tool_call>{{"name": "bash", "arguments": {ARGS}}}',
    f"<function=bash>\n<parameter=command>\n{COMMAND}\n</parameter>\n</function>",
    f"<function=bash>{ARGS}</function>",
    f'<function_calls>\n<invoke name="bash">\n<parameter name="command">{COMMAND}'
    f'</parameter>\n</invoke>\n</function_calls>',
    f'<minimax:tool_call>\n<invoke name="bash">\n<parameter name="command">{COMMAND}'
    f'</parameter>\n</invoke>\n</minimax:tool_call>',
    f"[TOOL_CALLS] [{{\"name\": \"bash\", \"arguments\": {ARGS}}}]",
    f"[TOOL_CALLS]bash[ARGS]{ARGS}",
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{ARGS}\n```"
    f"<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="bash">\n'
    f'<｜DSML｜parameter name="command" string="true">{COMMAND}</｜DSML｜parameter>\n'
    f'</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    '<｜｜DSML｜｜tool_calls>\n<｜｜DSML｜｜invoke name="bash">\n</｜｜DSML｜｜invoke>\n</｜｜DSML｜｜tool_calls>',
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
    f"<|tool_call_argument_begin|>{ARGS}<|tool_call_end|><|tool_calls_section_end|>",
    f'<|open|>tools<|sep|><|open|>call tool="bash" index="1"<|sep|><|open|>'
    f'argument key="command" type="string"<|sep|>{COMMAND}<|close|>argument<|sep|><|close|>'
    f'call<|sep|><|close|>tools<|sep|>',
    f']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="bash">]<]minimax[>[<command>'
    f'{COMMAND}]<]minimax[>[</command>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
    f'<|python_tag|>{{"name": "bash", "parameters": {ARGS}}}',
    f'<|python_tag|>bash.call(command="{COMMAND}")<|eom_id|>',
    f'[bash(command="{COMMAND}")]',
    f'[bash(command="{COMMAND}"), read_file(path="a.py")]',
    f'bash(command="{COMMAND}")',
    f'print(default_api.bash(command="{COMMAND}"))',
    f'```tool_code\nprint(bash(command="{COMMAND}"))\n```',
    f'```python\nbash(command="{COMMAND}")\n```',
    f"<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{ARGS}<|call|>",
    f"<|start|>assistant<|channel|>commentary to=functions.bash<|message|>{ARGS}<|call|>",
    f"<|channel|>analysis<|message|>{HM}<|end|><|start|>assistant<|channel|>"
    f"commentary to=functions.bash <|constrain|>json<|message|>{ARGS}<|call|>",
    f"commentary to=functions.bash json{ARGS}",
    f'{{"name": "bash", "arguments": {ARGS}}}',
    f'{{"tool": "bash", "args": {ARGS}}}',
    f'{{"tool_name": "bash", "tool_input": {ARGS}}}',
    f'{{"action": "bash", "action_input": {ARGS}}}',
    f'{{"function": "bash", "parameters": {ARGS}}}',
    f'{{"function": {{"name": "bash", "arguments": {ARGS}}}}}',
    f'{{"cmd": ["bash", "-lc", "{COMMAND}"], "timeout": 5}}',
    f'[{{"type": "tool_use", "id": "t1", "name": "bash", "input": {ARGS}}}]',
    f'{{"name": "bash", "arguments": {ARGS}}}\n{{"name": "ls", "arguments": {{}}}}',
    f'```json\n{{"name": "bash", "arguments": {ARGS}}}\n```',
    f'```bash\n{COMMAND}\n```',
    f"Action: bash\nAction Input: {ARGS}",
    f"Thought: I should run the tests.\nAction: bash\nAction Input: {ARGS}\nObservation:",
    f"<bash>\n<command>{COMMAND}</command>\n</bash>",
    f"<execute_command>\n<command>{COMMAND}</command>\n<requires_approval>false"
    f"</requires_approval>\n</execute_command>",
    "<read_file>\n<path>billing/settle.py</path>\n</read_file>",
    f'<tool name="bash">{ARGS}</tool>',
    f"<tool_use>\n<name>bash</name>\n<arguments>{ARGS}</arguments>\n</tool_use>",
    f'<xai:function_call name="bash">\n<parameter name="command">{COMMAND}</parameter>\n</xai:function_call>',
    f"<toolcall>{{\"name\": \"bash\", \"arguments\": {ARGS}}}</toolcall>",
    f"<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>{COMMAND}</arg_value>\n</tool_call>",
    f'<start_function_call>call:bash{{command:<escape>{COMMAND}<escape>}}<end_function_call>',
    f"<|START_ACTION|>[{{\"tool_call_id\": \"0\", \"tool_name\": \"bash\", \"parameters\": {ARGS}}}]<|END_ACTION|>",
    f'<|tool_call_start|>[bash(command="{COMMAND}")]<|tool_call_end|>',
    f"<|tool_call|>[{{\"name\": \"bash\", \"arguments\": {ARGS}}}]<|/tool_call|>",
    f"functools[{{\"name\": \"bash\", \"arguments\": {ARGS}}}]",
    f"✿FUNCTION✿: bash\n✿ARGS✿: {ARGS}",
    f"to=functions.bash {ARGS}",
    f"I'll check the tests first.\n<tool_call>\n{{\"name\": \"bash\", \"arguments\": {ARGS}}}\n</tool_call>",
    f"Let me run the tests.\n\n<bash>\n<command>{COMMAND}</command>\n</bash>",
    f"Let me read it.\n\n```json\n{{\"name\": \"bash\", \"arguments\": {ARGS}}}\n```",
    f"Let me look.<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
    f"<|tool_call_argument_begin|>{ARGS}<|tool_call_end|><|tool_calls_section_end|>",
    f"<think>{HM}</think>\n<tool_call>\n{{\"name\": \"bash\", \"arguments\": {ARGS}}}\n</tool_call>",
    "*** Begin Patch\n*** Update File: billing/settle.py\n@@\n-a\n+b\n*** End Patch",
]  # fmt: skip

REFUSALS = [
    "I'm sorry, but I can't help with that.",
    "Ich kann dabei leider nicht helfen.",
    "Désolé, je ne peux pas résumer cela.",
    "申し訳ありませんが、お手伝いできません。",
    "抱歉，我无法总结这段对话。",
    "К сожалению, я не могу помочь с этим.",
    "Ne yazık ki bu konuşmayı özetleyemem.",
    "Niestety nie mogę pomóc w tej sprawie.",
    "عذرا، لا أستطيع المساعدة في هذا الطلب.",
    "क्षमा करें, मैं इसमें मदद नहीं कर सकता।",
    "Which parts of this conversation would you like me to summarize?",
    "Could you clarify the format that you would like for the notes?",
    "What would you like me to do next?",
    "¿Qué te gustaría que hiciera ahora?",
    "Sure! I'd be happy to help. Please share the text.",
    "<refusal>I cannot do this.</refusal>",
    "Understood. I'm ready to continue whenever you are.",
]

REASONED = [
    f"<think>{HM}</think>{NOTES}",
    f"{NOTES}\n<think>{HM}</think>",
    f"{NOTES}\n\n<think>\n{HM}",
    f"{NOTES}\n<thinking>{HM}</thinking>\n",
    f"{NOTES}\n</think>",
    f"<think>{HM}</think>\n{NOTES}\n<think>That is all.</think>",
    f"<analysis>{HM}</think>\n{NOTES}",
    f"<analysis>{HM}</analysis>\n{NOTES}",
    f"<assessment>{HM}</assessment>\n{NOTES}",
    f"<|thinking|>{HM}<|/thinking|>{NOTES}",
    f"<|START_THINKING|>{HM}<|END_THINKING|><|START_RESPONSE|>{NOTES}<|END_RESPONSE|>",
    f"<|open|>think<|sep|>{HM}<|close|>think<|sep|><|open|>response<|sep|>{NOTES}<|close|>response<|sep|>",
    f"[THINK]{HM}[/THINK]{NOTES}",
    f"<details>\n<summary>Thinking</summary>\n{HM}\n</details>\n{NOTES}",
    f'<details type="reasoning" done="true">\n<summary>Thought for 3 seconds</summary>\n{HM}\n</details>\n{NOTES}',
    f"*Thinking...*\n> They want notes.\n\n{NOTES}",
    f"> Thinking: They want notes.\n> Goal: hm?\n\n{NOTES}",
    f"<ponder>{HM}</ponder>\n<summary>\n{NOTES}\n</summary>",
    f"<summary>\n{NOTES}\n</summary>",
    f"<think>{HM}</think><answer>{NOTES}</answer>",
    f"◁think▷{HM}◁/think▷{NOTES}",
    f"<|begin_of_thought|>{HM}<|end_of_thought|><|begin_of_solution|>{NOTES}<|end_of_solution|>",
    f"<|channel|>analysis<|message|>{HM}<|end|><|start|>assistant<|channel|>final<|message|>{NOTES}<|return|>",
    f"analysis{HM}assistantfinal{NOTES}",
    f"<｜think｜>{HM}<｜/think｜>{NOTES}",
    f"<mm:think>{HM}</mm:think>{NOTES}",
    f"<reflection>{HM}</reflection>\n<output>{NOTES}</output>",
    f"<inner_voice>{HM}</inner_voice>{NOTES}",
]

KEPT = [
    NOTES,
    f"<notes>\n{NOTES}\n</notes>",
    json.dumps({"goal": "fix the nightly job", "state": "billing/settle.py", "next": ["FIN-882"]}),
    "Goal: fix how <tool_call> is parsed in billing/settle.py.\nNext: add </tool_call> to the tests.",
    f"Goal: run `{COMMAND}`.\nNext:\n```bash\n{COMMAND}\n```",
    f'## Goal\nFix the job.\n## Exact\n```json\n{{"name": "bash", "arguments": {ARGS}}}\n```\n## Next\nFIN-882.',
    "# Ziel\nDen nächtlichen Job reparieren; billing/settle.py ist sortiert.\n# Nächstes\nFIN-882 bleibt.",
    "目标：修复夜间任务。状态：billing/settle.py 已排序。下一步：FIN-882。",
    "Goal: fix billing/settle.py. Open question: may FIN-882 stay?",
    "<h2>Goal</h2><p>Fix the nightly job in billing/settle.py.</p><h2>Next</h2><ul><li>FIN-882</li></ul>",
    'Goal: teach settle() to call bash(command="x").\nState: settle(ids) sorts in billing/settle.py.',
    "The user asked how to write <think> tags; billing/settle.py has them. FIN-882 stays.",
    "| topic | state |\n|---|---|\n| nightly job | billing/settle.py sorted |\n| FIN-882 | stays |",
]


@pytest.mark.parametrize("text", CALLS)
def test_a_call_is_no_summary(text: str) -> None:
    with pytest.raises(SummaryRejected):
        told(text)


@pytest.mark.parametrize("text", REFUSALS)
def test_a_refusal_or_question_is_no_summary(text: str) -> None:
    with pytest.raises(SummaryRejected):
        told(text)


@pytest.mark.parametrize("text", REASONED)
def test_notes_come_without_reasoning(text: str) -> None:
    found = told(text)
    assert NOTES in found
    assert "hm" not in found
    assert "That is all" not in found
    assert len(found) <= len(NOTES) + 80


@pytest.mark.parametrize("text", KEPT)
def test_notes_are_kept(text: str) -> None:
    assert told(text) == text
