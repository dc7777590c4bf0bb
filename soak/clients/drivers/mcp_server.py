"""An MCP server over standard input and output. Its tool prints the arguments, and other numbers for each call."""

from __future__ import annotations

import json
import sys
from typing import Any

SCHEMA = {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]}
TOOL = {"name": "lookup", "description": "Looks up a number.", "inputSchema": SCHEMA}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request."""
    match method:
        case "initialize":
            version = params["protocolVersion"]
            info = {"name": "soak", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            first = int(params["arguments"]["number"])
            lines = [*sys.argv[1:], *map(str, range(first, first + 600))]
            return {"content": [{"type": "text", "text": "\n".join(lines)}]}
    return {}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = answer(asked["method"], asked.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
