"""Messages of conversations, as applications send them."""

import functools
import json
from typing import Any

from tests.kit.upstream import first_tokens

Message = dict[str, Any]


@functools.cache
def words(count: int, seed: str = "word") -> str:
    """``count`` tokens of text, of another wording for each seed."""
    return first_tokens(" ".join(f"{seed}{number % 10}" for number in range(count)), count)


def system(text: Any = "Be brief.", role: str = "system") -> Message:
    return {"role": role, "content": text}


def user(text: Any, **more: Any) -> Message:
    return {"role": "user", "content": text, **more}


def assistant(text: Any, *calls: Message, **more: Any) -> Message:
    made: Message = {"tool_calls": list(calls)} if calls else {}
    return {"role": "assistant", "content": text, **more, **made}


def call(identity: str, name: str = "read_file", **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": identity, "type": "function", "function": function}


def result(identity: Any, text: Any) -> Message:
    return {"role": "tool", "tool_call_id": identity, "content": text}
