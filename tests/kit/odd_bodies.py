"""Chat requests in every spelling that JSON allows, and in some invalid ones. A relay must not change them.

Bodies are texts, so that tests control numbers, escapes, white space, and the order and duplicates of keys. Each
contains ``@STREAM@`` as the place for a ``stream`` field.
"""

import json
import random

SLOT = "@STREAM@"

_HI = '"messages":[{"role":"user","content":"hi"}]'
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def _field(text: str) -> str:
    return '{"model":"gpt-4o-mini",@STREAM@' + text + "," + _HI + "}"


def _content(text: str) -> str:
    return '{"model":"gpt-4o-mini",@STREAM@"messages":[{"role":"user","content":' + text + "}]}"


def _messages(text: str) -> str:
    return '{@STREAM@"messages":[' + text + '],"model":"gpt-4o-mini"}'


# All parameters of OpenAI's chat completions, and some of other servers.
PARAMETERS = (
    '"temperature":1.10',
    '"temperature":0',
    '"temperature":1E0',
    '"top_p":9.999999999999999999e-1',
    '"n":1',
    '"max_tokens":16',
    '"max_completion_tokens":16.0',
    '"stop":["\\n\\n","\\u0041"]',
    '"stop":null',
    '"presence_penalty":-0.0',
    '"frequency_penalty":-2',
    '"logit_bias":{"50256":-100,"1":1e-3}',
    '"logprobs":true,"top_logprobs":20',
    '"user":"a\\u0000b"',
    '"seed":9223372036854775808',
    '"seed":-9223372036854775809',
    '"seed":18446744073709551616',
    '"seed":123456789012345678901234567890123456789',
    '"service_tier":"flex","store":false,"metadata":{"z":"1","a":null}',
    '"stream_options":{"include_usage":true,"x":{}}',
    '"parallel_tool_calls":false,"tool_choice":"none"',
    '"reasoning_effort":"xhigh","verbosity":"low"',
    '"modalities":["text","audio"],"audio":{"voice":"alloy","format":"wav"}',
    '"prediction":{"type":"content","content":"x"}',
    '"web_search_options":{"search_context_size":"low"}',
    '"response_format":{"type":"json_object"}',
    '"prompt_cache_key":"k","safety_identifier":"s"',
    # other servers' own
    '"top_k":40,"min_p":0.05,"repetition_penalty":1.10,"guided_regex":"\\\\d+","extra_body":{"a":[[[]]]}',
    '"provider":{"order":["x"],"allow_fallbacks":false},"transforms":[]',
    '"chat_template_kwargs":{"enable_thinking":false}',
    '"cache_prompt":true,"grammar":"root ::= \\"x\\""',
)

# Values that parsers like to change.
VALUES = (
    "1e400",
    "-1e400",
    "1E5",
    "1e+05",
    "1.10",
    "-0",
    "-0.0",
    "0.1e-7",
    "9223372036854775807",
    "1.7976931348623157e308",
    "0.30000000000000004",
    "3.141592653589793238462643383279",
    '"\\u00e9"',
    '"é"',
    '"e\\u0301"',
    '"\\/"',
    '"/"',
    '"\\ud83d\\ude00"',
    '"\\uD83D\\uDE00"',
    '"😀"',
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '"a\\ud83dz"',
    '"\\u0000"',
    '"\\u2028\\u2029\\ufeff\\uffff"',
    '"\u2028\u2029\ufeff"',
    '"\\b\\f\\n\\r\\t\\"\\\\"',
    '"\u007f\u0080\u009f"',
    '"𐀀\U0001f9d1\u200d\U0001f680\U0002f800\U000e0041\U0010fffd"',
    '{"a":1,"a":2,"a":{"b":1,"b":null}}',
    '{"":"","\\u0061":1,"a":2}',
    "[null,true,false,[],{},[[]],[{}]]",
    "[ 1 ,\t2\r\n, 3 ]",
    '{ "z" : 1 ,\n\t"a" : 2 }',
)

_TOOL_TALK = (
    '{"role":"user","content":"go"},{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function",'
    '"function":{"name":"f","arguments":"{\\"x\\": 1e400, \\"y\\":\\"\\\\u00e9\\"}"},"extra":{"k":-0.0}}],'
    '"refusal":null,"annotations":[]},{"role":"tool","tool_call_id":"c1","content":"\\u00e9\\/","x":null}'
)

_HAND_WRITTEN = (
    "{" + SLOT + '"model":"gpt-4o-mini",' + _HI + "}",
    "\r\n\t {" + SLOT + ' "messages" : [ {"content":"hi" , "role" : "user"} ] ,\n "model":"gpt-4o-mini" } \n\n',
    '{"model":"first",' + SLOT + '"model":"gpt-4o-mini",' + _HI + "," + _HI + "}",
    "{" + SLOT + _HI + ',"model":"gpt\\u002d4o-mini"}',
    "{" + SLOT + _HI + ',"model":"gpt-4o-mini","m\\u006fdel":"other"}',
    "{" + SLOT + _HI + ',"model":"ft:gpt-4o-mini:\\u00e9:x"}',
    _messages('{"role":"system","content":"s"},{"role":"developer","content":"d"},{"role":"user","content":"u"}'),
    _messages('{"role":"user","content":"u","name":"Zoë","unknown":{"deep":[{"er":[1.0,1.00]}]}}'),
    _messages('{"role":"critic","content":"an unknown role"}'),
    _messages('{"content":"no role"}'),
    _messages('{"role":"user"}'),
    _messages('{"role":"user","content":""}'),
    _messages('{"role":"user","content":null}'),
    _messages(""),
    _messages(_TOOL_TALK),
    _messages('{"role":"tool","tool_call_id":"orphan","content":"no call before"}'),
    _messages(
        '{"role":"user","content":"f"},{"role":"assistant","content":null,"function_call":{"name":"f","arguments":"{}"}},'
        '{"role":"function","name":"f","content":"1.10"}'
    ),
    _messages('{"role":"assistant","content":[{"type":"refusal","refusal":"no"}],"audio":{"id":"audio_1"}}'),
    _content(
        '[{"type":"text","text":"what?"},{"type":"image_url","image_url":{"url":"data:image/png;base64,'
        + _PIXEL
        + '"}}]'
    ),
    _content('[{"type":"image_url","image_url":{"url":"https:\\/\\/example.test\\/a.png","detail":"low"}}]'),
    _content('[{"type":"input_audio","input_audio":{"data":"UklGRiQAAABXQVZF","format":"wav"}}]'),
    _content('[{"type":"file","file":{"filename":"a\\u00e9.pdf","file_data":"data:application/pdf;base64,JVBERi0="}}]'),
    _content(
        '[{"type":"file","file":{"file_id":"file-abc"}},{"type":"text","text":"","cache_control":{"type":"ephemeral"}}]'
    ),
    _content('[{"type":"video_url","video_url":{"url":"https://example.test/v.mp4"}}]'),
    _content('"' + "x" * 20_000 + '"'),
    _content('"' + "\\u00e9" * 3_000 + '"'),
    _field(
        '"tools":[{"type":"function","function":{"name":"f","strict":true,"parameters":{"type":"object","properties":'
        '{"b":{"type":"number","maximum":1e400},"a":{"enum":[1.0,"1",null]}},"required":["b"],"$defs":{},'
        '"additionalProperties":false}},"x":1},{"type":"custom","custom":{"name":"g"}}],"tool_choice":'
        '{"type":"function","function":{"name":"f"}}'
    ),
    _field('"functions":[{"name":"f","parameters":{}}],"function_call":"auto"'),
    _field(
        '"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{"type":"object","properties":'
        '{"\\u00e9":{"const":-0.0}},"additionalProperties":false},"strict":true}}'
    ),
    _field('"deep":' + "[" * 200 + "]" * 200),
    _field('"deep":' + '{"a":' * 200 + "null" + "}" * 200),
    _field('"wide":[' + ",".join(str(n) for n in range(3_000)) + "]"),
    _field('"model_":1,"Model":"x","MESSAGES":[]'),
)


def hand_written() -> list[str]:
    return [
        *_HAND_WRITTEN,
        *(_field(text) for text in PARAMETERS),
        *(_field(f'"odd":{text}') for text in VALUES),
        *(_messages('{"role":"user","content":"hi","odd":' + text + "}") for text in VALUES),
    ]


def generated(count: int) -> list[str]:
    dice = random.Random(20_240_607)
    return [_body(dice) for _ in range(count)]


def with_stream(body: str, streams: bool | None) -> bytes:
    """The bytes of a body that streams, or says that it does not, or says nothing of it."""
    said = {None: "", True: '"stream": true ,', False: '"stream":false,'}[streams]
    return body.replace(SLOT, said).encode()


def _body(dice: random.Random) -> str:
    messages = "[" + ",".join(_message(dice) for _ in range(dice.randint(1, 8))) + "]"
    fields = ['"model":"gpt-4o-mini"', f'"messages":{space(dice)}{messages}', *dice.sample(PARAMETERS, 3)]
    fields += [f"{json.dumps(_word(dice))}{space(dice)}:{value(dice, 4)}" for _ in range(dice.randint(0, 4))]
    dice.shuffle(fields)
    return space(dice) + "{" + SLOT + f",{space(dice)}".join(fields) + space(dice) + "}"


def _message(dice: random.Random) -> str:
    fields = [f'"role":"{dice.choice(("user", "assistant", "system", "developer"))}"']
    fields.append(f'"content":{string(dice)}')
    if dice.random() < 0.5:
        fields.append(f"{string(dice)}:{value(dice, 3)}")
    dice.shuffle(fields)
    return "{" + f"{space(dice)},".join(fields) + "}"


def value(dice: random.Random, depth: int) -> str:
    kind = dice.random()
    if depth and kind < 0.25:
        items = (value(dice, depth - 1) for _ in range(dice.randint(0, 4)))
        return "[" + f",{space(dice)}".join(items) + "]"
    if depth and kind < 0.5:
        pairs = (f"{string(dice)}:{space(dice)}{value(dice, depth - 1)}" for _ in range(dice.randint(0, 4)))
        return "{" + ",".join(pairs) + "}"
    return dice.choice(VALUES) if kind < 0.8 else string(dice)


def string(dice: random.Random) -> str:
    return '"' + "".join(_character(dice) for _ in range(dice.randint(0, 40))) + '"'


def _character(dice: random.Random) -> str:
    ranges = ((0x20, 0x7E), (0xA0, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFD), (0x10000, 0x10FFFF))
    code = dice.randint(*dice.choice(ranges))
    if code in (0x22, 0x5C):
        return "\\" + chr(code)
    if dice.random() < 0.3:
        units = chr(code).encode("utf-16-be")
        spelled = "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
        return spelled.upper().replace("\\U", "\\u") if dice.random() < 0.3 else spelled
    return chr(code)


def _word(dice: random.Random) -> str:
    return "x_" + "".join(dice.choice("abcdefghij") for _ in range(6))


def space(dice: random.Random) -> str:
    return dice.choice(("", "", "", " ", "\n", "\t", "\r\n  "))
