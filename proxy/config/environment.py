"""Environment variables in a configuration: ``${NAME}`` and ``${NAME:-default}``.

They replace text only: a variable's value can't add a key or change the structure. ``$${`` is a literal ``${``. As in a
shell, ``:-`` also applies when the variable is set but empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from proxy.config.issues import Issue, Issues, issue
from proxy.config.tree import Node

_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<inside>[^{}]*)\}|\$\{")
_INSIDE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-.*)?", re.DOTALL)
# How LiteLLM, shells and GitHub Actions write a variable. Without braces it would be sent as the key.
_ELSEWHERE = re.compile(r"(?:os\.environ/|env[:/]|\$)([A-Za-z_][A-Za-z0-9_]*)|\$?\{\{ *(?:env\.|secrets\.)(\w+) *\}\}")


def substitute(root: Node, environ: Mapping[str, str]) -> Node:
    """Return the tree with every variable replaced by its value. Raises ``Issues`` for variables that aren't set."""
    issues: list[Issue] = []
    replaced = _replaced(root, environ, issues)
    if issues:
        raise Issues(issues)
    return replaced


def _replaced(node: Node, environ: Mapping[str, str], issues: list[Issue]) -> Node:
    if isinstance(node.value, dict):
        return replace(node, value={key: _replaced(value, environ, issues) for key, value in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, value=[_replaced(item, environ, issues) for item in node.value])
    if not isinstance(node.value, str):
        return node
    if (found := _ELSEWHERE.fullmatch(node.value)) is not None:
        fix = f'"${{{found[1] or found[2]}}}"'
        issues.append(issue(node.start, "isn't how variables are written here", fix))
        return node
    if "${" not in node.value:
        return node
    text = _REFERENCE.sub(lambda match: _value(match, node.start, environ, issues), node.value)
    return replace(node, value=text, text=text, substituted=True)


def _value(match: re.Match[str], line: int, environ: Mapping[str, str], issues: list[Issue]) -> str:
    if match[0] == "$${":
        return "${"
    inside = _INSIDE.fullmatch(match["inside"] or "")
    if inside is None:
        # The text in the braces isn't quoted: it may be a key.
        form = "write ${NAME} or ${NAME:-default}, and $${ for a literal ${"
        issues.append(issue(line, "the text after '${' isn't the name of a variable", form))
        return ""
    name, default = inside["name"], inside["default"]
    value = environ.get(name)
    if default is not None:
        return value or str(default[2:])
    if value is None:
        # A default isn't offered: most variables hold secrets.
        issues.append(issue(line, f"${{{name}}} isn't set", f"export {name}=VALUE"))
    return value or ""
