"""Conversations with the newer kinds of items and blocks, for Messages and Responses, turn by turn.

A ``Talk`` appends to ``units`` and yields when its client would send them. Each text begins with a fact of its own.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tests.kit.agent_script import picture
from tests.kit.message_checks import blocks_of
from tests.kit.messages import words
from tests.kit.upstream import text_tokens

Unit = dict[str, Any]

FACT = re.compile(r"QZX\d+x\d+z")
NOTE = re.compile(r"^(# \w+)\n(.*)$", re.MULTILINE)
LOADABLE = 40
"""Tools whose definitions may be loaded later."""
SILENT = ("id", "call_id", "tool_use_id", "type", "role", "status", "data", "image_url", "url", "encrypted_content")
SILENT += ("fingerprint", "signature", "caller", "file_data", "execution", "media_type", "server_label")


class Talk:
    """A conversation of ``size`` times the window, or of this many turns. ``units`` has its messages or items."""

    api = ""

    def __init__(self, seed: int, window: int, size: float = 0, turns: int = 0) -> None:
        self.rng = random.Random(f"{self.api} {seed} {window}")
        self.units: list[Unit] = []
        self.window = window
        self._seed, self._size, self._turns = seed, size, turns
        self._facts = self._ids = self._loaded = 0
        self._written = 0
        self.refers = False
        """Whether the client sends references instead of the model's items."""
        self.known: dict[str, Unit] = {}
        self.signed: list[str] = []
        self.task = ""
        """The user's newest text."""
        self._beside = self.rng.random() < 0.25
        """Whether the client adds a text to each result."""
        self._state = 0.02 if self._beside else self.rng.choice((0.02, 0.1, 0.1, 0.25))
        """Share of the turns that change what is in effect."""

    def requests(self) -> Iterator[int]:
        """Write the conversation. Yield the number of units whenever its client sends it."""
        self.begin()
        for turn in range(self._turns):
            if turn % 35 == 0:
                self.asked(60)
                yield len(self.units)
            for _ in (self.rng.choice(self.changes) if turn % 20 == 3 else self.calls[0])():
                yield len(self.units)
            if turn % 35 == 34:
                self.say(self.text(40))
        while self._written < self._size * self.window:
            self.asked(self.rng.choice((40, 60, 600)))
            yield len(self.units)
            for _ in range(self.rng.choice((1, 2, 4, 8))):
                changes = self.rng.random() < self._state
                for _ in self.rng.choice(self.changes if changes else self.calls if self._beside else self.steps)():
                    yield len(self.units)
            self.say(self.text(40))

    def text(self, tokens: int, most: float = 0.5) -> str:
        """Return a new text, which begins with its fact. A few are large."""
        rng = self.rng
        size = tokens * self.window // 16_000
        size = int(size * rng.choice((0.3, 1, 1, 2))) if rng.random() < 0.97 else int(self.window * most * rng.random())
        self._facts += 1
        self._written += size
        return f"QZX{self._seed}x{self._facts}z {words(max(size, 5), rng.choice('abcdefgh'))}"

    def id(self, prefix: str) -> str:
        self._ids += 1
        return f"{prefix}_{self._ids}"

    def tool(self) -> str:
        """Return the name of a tool to load, most often a new one."""
        self._loaded += self.rng.random() < 0.8
        return f"tool_{self._loaded % LOADABLE}"

    def begin(self) -> None:
        """Write what comes before the first question."""

    def asked(self, tokens: int) -> None:
        """Write a message of the user."""
        self.task = self.text(tokens, 0.1)
        self.ask(self.task)

    def ask(self, text: str) -> None:
        raise NotImplementedError

    def say(self, text: str) -> None:
        raise NotImplementedError

    @property
    def steps(self) -> Sequence[Callable[[], Iterator[None]]]:
        """The ways to go on. Each yields when its client sends a request."""
        raise NotImplementedError

    @property
    def calls(self) -> Sequence[Callable[[], Iterator[None]]]:
        """The ways to call a client that adds a text to each result."""
        raise NotImplementedError

    @property
    def changes(self) -> Sequence[Callable[[], Iterator[None]]]:
        """The ways to change what is in effect."""
        return self.steps

    def fields(self) -> Unit:
        """Return the fields of the request without its units."""
        return {}

    def exchanges(self) -> Iterator[tuple[int, str, list[Unit]]]:
        """Write the conversation. Yield each request's number of units and newest question, and its answer's items."""
        before = None
        for end in self.requests():
            if before is not None:
                yield *before, self.answer(before[0])
            before = end, self.task

    def answer(self, start: int) -> list[Unit]:
        """Return the model's items from ``start`` on, if the client will refer to them."""
        return []

    def answered(self, start: int, prompt: Unit) -> None:
        """Complete the units after ``start``, which answer a prompt."""

    def resolved(self, unit: Unit) -> Unit:
        """Return a unit, or the one that it refers to."""
        return self.known.get(unit.get("id", ""), unit) if unit.get("type") == "item_reference" else unit


class Messages(Talk):
    api = "messages"

    def begin(self) -> None:
        self._thinks = self.rng.random() < 0.4
        self._notes: list[Unit] = []
        texts = [f"# {name}\n{self.text(20, 0.02)}\n" for name in ("claudeMd", "environment", "skills")]
        form = self.rng.random()
        if form < 0.3:  # one reminder for each
            self._notes = [_text(f"<system-reminder>\n{text}</system-reminder>") for text in texts]
        elif form < 0.7:  # as Claude Code sends them
            opening = "As you answer the user's questions, you can use the following context:\n"
            self._notes = [
                _text(f"<system-reminder>\n{opening}{''.join(texts)}\n      IMPORTANT: …\n</system-reminder>\n\n")
            ]
        self._listed = form >= 0.5

    def ask(self, text: str) -> None:
        rng, blocks = self.rng, [*self._notes, _text(text)]
        self._notes = []
        if rng.random() < 0.2:
            blocks.insert(0, rng.choice((self._document, self._found, _image))())
        self._add("user", *blocks)
        if self._listed:
            self.units.append(
                {"role": "system", "content": f"The following skills are available: {self.text(20, 0.02)}"}
            )
        self._listed = False

    def say(self, text: str) -> None:
        self._add("assistant", _text(text))

    def fields(self) -> Unit:
        schema = {"type": "object"}
        deferred = [{"name": f"tool_{n}", "input_schema": schema, "defer_loading": True} for n in range(LOADABLE)]
        own = [{"name": "f", "input_schema": schema}, {"type": "code_execution_20260120", "name": "code_execution"}]
        return {"max_tokens": self.window // 16, "tools": [*own, *deferred]}

    @property
    def steps(self) -> Sequence[Callable[[], Iterator[None]]]:
        return [self._calls] * 4 + [self._hosted, self._hosted, self._paused, self._program, self._reminded]

    @property
    def calls(self) -> Sequence[Callable[[], Iterator[None]]]:
        return [self._calls]

    @property
    def changes(self) -> Sequence[Callable[[], Iterator[None]]]:
        return [self._load, self._load, self._load_at_server, self._change_tools]

    def _add(self, role: str, *blocks: Unit) -> None:
        thought: Unit = {"type": "thinking", "thinking": "Let me think.", "signature": ""}
        self.units.append({"role": role, "content": [*[thought][: self._thinks and role == "assistant"], *blocks]})

    def answered(self, start: int, prompt: Unit) -> None:
        """Sign the thinking."""
        for block in self.units[start]["content"] if self.units[start]["role"] == "assistant" else ():
            if block["type"] == "thinking":
                self.signed.append(f"{signatures(prompt)[1]} {start}")
                block["signature"] = self.signed[-1]

    def _document(self) -> Unit:
        text = self.text(100)
        plain = {"type": "text", "media_type": "text/plain", "data": text}
        source = self.rng.choice((plain, {"type": "content", "content": [_text(text)]}))
        return {"type": "document", "title": "report", "source": source}

    def _found(self) -> Unit:
        return {"type": "search_result", "source": "s", "title": "t", "content": [_text(self.text(60, 0.02))]}

    def _use(self, **caller: Any) -> Unit:
        return {"type": "tool_use", "id": self.id("toolu"), "name": "f", "input": {"q": self.text(8)}, **caller}

    def _result(self, call: Unit, content: Any = None) -> Unit:
        if content is None:
            parts = (
                lambda: [_text(self.text(60, 0.02)), _text(self.text(60, 0.02))],
                lambda: [self._found(), self._found()],
            )
            more = (lambda: [self._document()], lambda: [_text(self.text(20)), _image()])
            texts = (lambda: self.text(120, 1.2),) * 4
            content = self.rng.choice((*texts, *parts, *more))()
        return {"type": "tool_result", "tool_use_id": call["id"], "content": content}

    def _calls(self) -> Iterator[None]:
        calls = [self._use() for _ in range(1 if self._beside else self.rng.choice((1, 1, 3)))]
        self._add("assistant", *([_text(self.text(10))] if self.rng.random() < 0.3 else []), *calls)
        beside = [_text(f"<environment_details>\n{self.text(20)}")] if self._beside else []
        self._add("user", *map(self._result, calls), *beside)
        yield

    def _server(self) -> tuple[Unit, Unit]:
        """Return a call that the server ran, and its result."""
        code = {"type": "code_execution_result", "stdout": self.text(60), "stderr": "", "return_code": 0, "content": []}
        page = {"type": "web_fetch_result", "url": "https://host", "content": self._document()}
        hit = {"type": "web_search_result", "title": self.text(5), "url": "u", "encrypted_content": "e" * 300}
        kind, content = self.rng.choice((("code_execution", code), ("web_fetch", page), ("web_search", [hit])))
        call = {"type": "server_tool_use", "id": self.id("srvtoolu"), "name": kind, "input": {"q": self.text(8)}}
        return call, {"type": f"{kind}_tool_result", "tool_use_id": call["id"], "content": content}

    def _hosted(self) -> Iterator[None]:
        call, result = self._server()
        if self.rng.random() < 0.4:
            call |= {"type": "mcp_tool_use", "name": "m", "server_name": "s"}
            result |= {"type": "mcp_tool_result", "is_error": False, "content": [_text(self.text(60))]}
        self._add("assistant", call, result, _text(self.text(20)))
        self.asked(10)
        yield

    def _paused(self) -> Iterator[None]:
        """Write a turn that pauses several times."""
        call, result = self._server()
        self._add("assistant", _text(self.text(10)), call)
        for _ in range(self.rng.choice((1, 2, 5))):
            yield
            another, next_ = self._server()
            self._add("assistant", result, _text(self.text(30)), another)
            result = next_
        yield
        self._add("assistant", result, _text(self.text(20)))
        self.asked(10)
        yield

    def _program(self) -> Iterator[None]:
        """Write a program that calls the client's tools."""
        call = {"type": "server_tool_use", "id": self.id("srvtoolu"), "name": "code_execution"}
        call["input"] = {"code": self.text(20)}
        caller = {"caller": {"type": "code_execution_20260120", "tool_id": call["id"]}}
        first = [call]
        for _ in range(self.rng.choice((1, 3, 6))):
            uses = [self._use(**caller) for _ in range(self.rng.choice((1, 2)))]
            self._add("assistant", *first, *uses)
            self._add("user", *(self._result(use, self.text(40, 0.03)) for use in uses))
            first = []
            yield
        done = {"type": "code_execution_result", "stdout": self.text(30), "stderr": "", "return_code": 0, "content": []}
        result = {"type": "code_execution_tool_result", "tool_use_id": call["id"], "content": done}
        self._add("assistant", result, _text(self.text(20)))
        self.asked(10)
        yield

    def _reminded(self) -> Iterator[None]:
        yield from self._calls()
        self._add("system", _text(self.text(15)))
        yield

    def _load(self) -> Iterator[None]:
        call = self._use()
        named = [{"type": "tool_reference", "tool_name": self.tool()} for _ in range(self.rng.choice((1, 1, 3)))]
        self._add("assistant", call)
        beside = [_text("Tool loaded.")] if self.rng.random() < 0.5 else []
        self._add("user", self._result(call, named), *beside)
        yield

    def _load_at_server(self) -> Iterator[None]:
        call = {"type": "server_tool_use", "id": self.id("srvtoolu"), "name": "tool_search_tool_regex"}
        call["input"] = {"pattern": self.text(5, 0.01)}
        named = [{"type": "tool_reference", "tool_name": self.tool()}]
        content = {"type": "tool_search_tool_search_result", "tool_references": named}
        result = {"type": "tool_search_tool_result", "tool_use_id": call["id"], "content": content}
        use = self._use()
        self._add("assistant", call, result, use)
        self._add("user", self._result(use))
        yield

    def _change_tools(self) -> Iterator[None]:
        yield from self._calls()
        kinds = self.rng.choice((("tool_removal",), ("tool_removal", "tool_removal"), ("tool_addition",)))
        self._add(
            "system", *({"type": kind, "tool": {"type": "tool_reference", "name": self.tool()}} for kind in kinds)
        )
        yield


class Responses(Talk):
    api = "responses"

    def begin(self) -> None:
        if self.rng.random() < 0.3:  # codex sends its own tools this way
            self._add("additional_tools", role="developer", tools=[_function(f"own_{n}") for n in range(8)])
        if self.rng.random() < 0.15:
            self.units.append({"role": "user", "content": self.text(20)})
            self._add("compaction", id="cmp_1", encrypted_content="c" * 800)
        self.refers = self.rng.random() < 0.2

    def ask(self, text: str) -> None:
        parts = [{"type": "input_text", "text": text}]
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture(1)}"}
        self.units.append({"role": "user", "content": [*parts, image] if self.rng.random() < 0.1 else text})

    def say(self, text: str) -> None:
        self._reason()
        refusal = {"type": "refusal", "refusal": text} if self.rng.random() < 0.1 else None
        part = refusal or {"type": "output_text", "text": text, "annotations": []}
        self.units.append({"type": "message", "role": "assistant", "content": [part]})

    def fields(self) -> Unit:
        own = {"type": "function", "name": "f", "parameters": {"type": "object"}}
        kinds = ("shell", "local_shell", "apply_patch", "programmatic_tool_calling", "web_search", "code_interpreter")
        search = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
        return {"store": self.refers, "tools": [own, search, *({"type": kind} for kind in kinds)]}

    @property
    def steps(self) -> Sequence[Callable[[], Iterator[None]]]:
        own = [self._functions] * 3 + [self._custom, self._shell, self._local_shell, self._patch, self._computer]
        return [*own, self._hosted, self._hosted, self._approval, self._program, self._program, self._unknown]

    @property
    def calls(self) -> Sequence[Callable[[], Iterator[None]]]:
        return [self._functions]

    @property
    def changes(self) -> Sequence[Callable[[], Iterator[None]]]:
        return [self._search, self._search, self._search_at_server, self._add_tools, self._list_tools]

    def _add(self, kind: str, **fields: Any) -> None:
        self.units.append({"type": kind, **fields})

    def answer(self, start: int) -> list[Unit]:
        """See ``Talk``."""
        made: list[Unit] = []
        for place in range(start, len(self.units) if self.refers else 0):
            item = self.units[place]
            if item.get("role", "assistant") != "assistant" or item["type"].endswith("_output") or "caller" in item:
                break
            made.append(item | {"id": item.get("id") or self.id("item")})
            self.units[place] = {"type": "item_reference", "id": made[-1]["id"]}
        self.known |= {item["id"]: item for item in made}
        return made

    def _reason(self) -> None:
        if self.rng.random() < 0.2:
            self._add("reasoning", summary=[], encrypted_content="s" * 400)

    def _functions(self, **caller: Any) -> Iterator[None]:
        ids = [self.id("call") for _ in range(1 if self._beside else self.rng.choice((1, 1, 3)))]
        for id_ in ids:
            self._add("function_call", call_id=id_, name="f", arguments=json.dumps({"q": self.text(8)}), **caller)
        for id_ in ids:
            text = self.text(40 if caller else 120, 0.03 if caller else 1.2)
            output: Any = [{"type": "input_text", "text": text}] if self.rng.random() < 0.3 else text
            self._add("function_call_output", call_id=id_, output=output, **caller)
        if self._beside and not caller:
            self.units.append({"role": "user", "content": f"<environment_details>\n{self.text(20)}"})
        yield

    def _pair(self, kind: str, made: Unit, output: Any, **answered: Any) -> Iterator[None]:
        id_ = self.id("call")
        self._reason()
        self._add(kind, call_id=id_, **made)
        self._add(f"{kind}_output", call_id=id_, output=output, **answered)
        yield

    def _custom(self) -> Iterator[None]:
        return self._pair("custom_tool_call", {"name": "g", "input": self.text(30)}, self.text(100, 1.2))

    def _shell(self) -> Iterator[None]:
        done = {"stderr": self.text(5), "outcome": {"type": "exit", "exit_code": 0}}
        output = [{"stdout": self.text(100, 1.2), **done} for _ in range(self.rng.choice((1, 2)))]
        return self._pair("shell_call", {"action": {"commands": [self.text(10)]}}, output)

    def _local_shell(self) -> Iterator[None]:
        action = {"type": "exec", "command": ["sh", self.text(10)], "env": {}}
        return self._pair("local_shell_call", {"id": self.id("lsh"), "action": action}, self.text(100, 1.2))

    def _patch(self) -> Iterator[None]:
        operation = {"type": "update_file", "path": "a.py", "diff": self.text(60)}
        return self._pair("apply_patch_call", {"operation": operation}, self.text(10), status="completed")

    def _computer(self) -> Iterator[None]:
        made = {"actions": [{"type": "type", "text": self.text(5)}], "pending_safety_checks": [], "status": "completed"}
        screen = {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{picture(2)}"}
        return self._pair("computer_call", made, screen)

    def _unknown(self) -> Iterator[None]:
        return self._pair("future_call", {"detail": {"note": self.text(20)}}, {"note": self.text(40)})

    def _hosted(self) -> Iterator[None]:
        rng = self.rng
        kind = rng.choice(("web_search_call", "file_search_call", "code_interpreter_call", "mcp_call"))
        found = [{"file_id": "f", "filename": "n", "score": 1, "text": self.text(60)}]
        fields: Mapping[str, Unit] = {
            "web_search_call": {"action": {"type": "search", "query": "q", "queries": [self.text(5)]}},
            "file_search_call": {"queries": ["q"], "results": found},
            "code_interpreter_call": {"code": "1", "container_id": "c", "outputs": [_logs(self.text(60))]},
            "mcp_call": {"server_label": "s", "name": "m", "arguments": "{}", "output": self.text(80)},
        }
        self._add(kind, id=self.id(kind), status="completed", **fields[kind])
        self.say(self.text(20))
        self.asked(10)
        yield

    def _approval(self) -> Iterator[None]:
        id_ = self.id("mcpr")
        self._add("mcp_approval_request", id=id_, server_label="s", name="m", arguments=json.dumps({"q": self.text(8)}))
        self._add("mcp_approval_response", approval_request_id=id_, approve=True)
        yield
        self._add("mcp_call", id=self.id("mcp"), server_label="s", name="m", arguments="{}", output=self.text(40))
        self.say(self.text(10))
        self.asked(10)
        yield

    def _program(self) -> Iterator[None]:
        id_ = self.id("prog")
        self._add("program", id=self.id("pg"), call_id=id_, code=self.text(20), fingerprint="z" * 100)
        for _ in range(self.rng.choice((1, 3, 6))):
            yield from self._functions(caller={"type": "program", "caller_id": id_})
        self._add("program_output", id=self.id("po"), call_id=id_, result=self.text(40), status="completed")
        yield

    def _tools(self) -> list[Unit]:
        names = [self.tool() for _ in range(self.rng.choice((1, 1, 3)))]
        return [_function(name) for name in names]

    def _search(self) -> Iterator[None]:
        id_ = self.id("call")
        self._add("tool_search_call", call_id=id_, execution="client", arguments={"q": self.text(5, 0.01)})
        self._add("tool_search_output", call_id=id_, execution="client", status="completed", tools=self._tools())
        yield

    def _search_at_server(self) -> Iterator[None]:
        self._add("tool_search_call", id=self.id("tsc"), execution="server", arguments={"q": self.text(5, 0.01)})
        self._add("tool_search_output", id=self.id("tso"), execution="server", tools=self._tools())
        yield from self._functions()

    def _add_tools(self) -> Iterator[None]:
        yield from self._functions()
        self._add("additional_tools", role="developer", tools=self._tools())
        yield

    def _list_tools(self) -> Iterator[None]:
        tools = [{"name": self.tool(), "description": "A tool.", "input_schema": {"type": "object"}}]
        self._add("mcp_list_tools", id=self.id("mcpl"), server_label=self.id("server"), tools=tools)
        yield from self._hosted()


TALKS: dict[str, type[Talk]] = {talk.api: talk for talk in (Messages, Responses)}


def in_effect(units: Sequence[Unit]) -> dict[str, str]:
    """Return what is in effect at the end of a prompt: tools that were loaded, added, or removed, and first notes."""
    found: dict[str, str] = {}
    if [unit.get("role") for unit in units[:2]] == ["user", "system"]:
        found["note at the start"] = units[1]["content"]
    for unit in units:
        if unit.get("type") == "compaction":
            found["compaction"] = unit["encrypted_content"]
        if unit.get("type") in ("tool_search_output", "additional_tools"):
            found |= {f"tool {tool['name']}": json.dumps(tool, sort_keys=True) for tool in unit["tools"]}
        content = unit.get("content")
        for block in content if isinstance(content, list) else ():
            if block["type"] in ("tool_addition", "tool_removal"):
                found[f"tool {block['tool']['name']}"] = block["type"]
            if block["type"] in ("tool_result", "tool_search_tool_result"):
                inner = block["content"]
                named = inner["tool_references"] if isinstance(inner, dict) else inner
                loaded = [one["tool_name"] for one in named if isinstance(one, dict) and "tool_name" in one]
                found |= {f"tool {name}": "tool_addition" for name in loaded}
            if block["type"] == "text" and block["text"].startswith("<system-reminder>"):
                found |= {f"note {heading}": text for heading, text in NOTE.findall(block["text"])}
    return found


def signatures(prompt: Unit) -> tuple[list[tuple[str, str]], str]:
    """Return the signatures of a prompt's thinking, each with the digest of the blocks before it, and of all blocks."""
    found: list[tuple[str, str]] = []
    running = hashlib.sha256(json.dumps([prompt.get("system"), prompt["tools"]]).encode())
    for message in prompt["messages"]:
        for block in blocks_of(message):
            if block["type"] == "thinking":
                found.append((block["signature"], running.hexdigest()))
            else:
                running.update(json.dumps([message["role"], block]).encode())
    return found, running.hexdigest()


def visible_tokens(value: Any) -> int:
    """Return the tokens of all text that a model sees, without frames, media, and sealed parts."""
    if isinstance(value, str):
        return _counted(value)
    if isinstance(value, dict):
        plain = value.get("media_type") == "text/plain"
        return sum(visible_tokens(one) for key, one in value.items() if key not in SILENT or (key == "data" and plain))
    return sum(map(visible_tokens, value)) if isinstance(value, list) else 0


@lru_cache(100_000)
def _counted(text: str) -> int:
    return text_tokens(text)


def _text(text: str) -> Unit:
    return {"type": "text", "text": text}


def _image() -> Unit:
    source = {"type": "base64", "media_type": "image/png", "data": picture(1)}
    return {"type": "image", "source": source}


def _logs(text: str) -> Unit:
    return {"type": "logs", "logs": text}


def _function(name: str) -> Unit:
    schema = {"type": "object", "properties": {"id": {"type": "string", "description": "The ticket's number"}}}
    return {"type": "function", "name": name, "description": f"Does {name}.", "parameters": schema}
