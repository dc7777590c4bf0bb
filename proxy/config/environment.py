"""Environment variables in a configuration: ``${NAME}`` and ``${NAME:-default}``.

They replace text only: a variable's value can't add a key or change the structure. ``$${`` is a literal ``${``. As in a
shell, ``:-`` also applies when the variable is set but empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Environ
from dataclasses import replace

from proxy.config.faults import Issue, Issues, said
from proxy.config.tree import Mapping, Node, Scalar, Sequence

_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<inside>[^{}]*)\}|\$\{")
_INSIDE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-.*)?", re.DOTALL)
# How LiteLLM, shells and GitHub Actions write a variable. Without braces it would be sent as the key.
_ELSEWHERE = re.compile(r"(?:os\.environ/|env[:/]|\$)([A-Za-z_][A-Za-z0-9_]*)|\$?\{\{ *(?:env\.|secrets\.)(\w+) *\}\}")


def substitute(root: Mapping, environ: Environ[str, str]) -> Mapping:
    """Return the tree with every variable replaced by its value. Raises ``Issues`` for variables that aren't set."""
    substitution = _Substitution(environ)
    replaced = substitution.mapping(root)
    if substitution.faults:
        raise Issues(substitution.faults)
    return replaced


class _Substitution:
    def __init__(self, environ: Environ[str, str]) -> None:
        self._environ = environ
        self.faults: list[Issue] = []

    def mapping(self, node: Mapping) -> Mapping:
        return Mapping(node.line, {key: self._node(value) for key, value in node.items.items()}, node.lines)

    def _node(self, node: Node) -> Node:
        if isinstance(node, Mapping):
            return self.mapping(node)
        if isinstance(node, Sequence):
            return Sequence(node.line, tuple(self._node(item) for item in node.items))
        return self._scalar(node)

    def _scalar(self, node: Scalar) -> Scalar:
        if not isinstance(node.value, str):
            return node
        if (found := _ELSEWHERE.fullmatch(node.value)) is not None:
            name = found[1] or found[2]
            message = said("isn't how variables are written here", f'"${{{name}}}"')
            self.faults.append(Issue(node.line, message))
            return node
        if "${" not in node.value:
            return node
        text = _REFERENCE.sub(lambda match: self._value(match, node.line), node.value)
        return replace(node, value=text, text=text, substituted=True)

    def _value(self, match: re.Match[str], line: int) -> str:
        if match[0] == "$${":
            return "${"
        inside = _INSIDE.fullmatch(match["inside"] or "")
        if inside is None:
            # The text in the braces isn't quoted: it may be a key.
            form = "write ${NAME} or ${NAME:-default}, and $${ for a literal ${"
            self.faults.append(Issue(line, said("the text after '${' isn't the name of a variable", form)))
            return ""
        name, default = inside["name"], inside["default"]
        value = self._environ.get(name)
        if default is not None:
            return value or default[2:]
        if value is None:
            fix = f"set {name} in the environment, or write ${{{name}:-default}}"
            self.faults.append(Issue(line, said(f"${{{name}}} isn't set", fix)))
            return ""
        return value
