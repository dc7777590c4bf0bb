"""Variables of the environment inside a configuration: ``${NAME}`` and ``${NAME:-default}``.

They stand in for text only: what a variable holds can never add a key or change the structure. ``$${`` is a literal
``${``. As in a shell, ``:-`` also applies where the variable is set but empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Environ
from dataclasses import replace

from proxy.config.faults import Fault, Faults
from proxy.config.tree import Mapping, Node, Scalar, Sequence, shown

_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<inside>[^{}]*)\}|\$\{")
_INSIDE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-.*)?", re.DOTALL)


def substitute(root: Mapping, environ: Environ[str, str]) -> Mapping:
    """The tree with every variable replaced by its value. Raises ``Faults``, one for each that has none."""
    substitution = _Substitution(environ)
    replaced = substitution.mapping(root)
    if substitution.faults:
        raise Faults(substitution.faults)
    return replaced


class _Substitution:
    def __init__(self, environ: Environ[str, str]) -> None:
        self._environ = environ
        self.faults: list[Fault] = []

    def mapping(self, node: Mapping) -> Mapping:
        return Mapping(node.line, {key: self._node(value) for key, value in node.items.items()}, node.lines)

    def _node(self, node: Node) -> Node:
        if isinstance(node, Mapping):
            return self.mapping(node)
        if isinstance(node, Sequence):
            return Sequence(node.line, tuple(self._node(item) for item in node.items))
        return self._scalar(node)

    def _scalar(self, node: Scalar) -> Scalar:
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        text = _REFERENCE.sub(lambda match: self._value(match, node.line), node.value)
        return replace(node, value=text, text=text, substituted=True)

    def _value(self, match: re.Match[str], line: int) -> str:
        if match[0] == "$${":
            return "${"
        inside = _INSIDE.fullmatch(match["inside"] or "")
        if inside is None:
            form = "write ${NAME} or ${NAME:-default}, and $${ for a literal ${"
            self.faults.append(Fault(line, f"'{shown(match[0])}' is no variable: {form}"))
            return ""
        name, default = inside["name"], inside["default"]
        value = self._environ.get(name)
        if default is not None:
            return value or default[2:]
        if value is None:
            self.faults.append(Fault(line, f"${{{name}}} is not set: set {name}, or write ${{{name}:-default}}"))
            return ""
        return value
