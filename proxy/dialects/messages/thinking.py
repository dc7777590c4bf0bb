"""Which models of Anthropic check that thinking is sent back behind the same prompt.

See platform.claude.com/docs/en/build-with-claude/preserved-thinking, August 2026. From Claude Fable 5.1 on, the
signature of a thinking block covers the system prompt, the tools, and all messages before it.
"""

from __future__ import annotations

import re

from proxy.limits.profiles.names import undated

_FIRST_CHECKED = (5, 1)
_FIRST_CHECKED_BY_FAMILY = {"mythos": (5, 2)}
"""The first version that checks, by family, if it isn't ``_FIRST_CHECKED``."""

_VERSION = re.compile(r"(?<![\w.])(\d{1,2})(?:\.(\d{1,2}))?(?![\w.])")


def checks_prefix(model: str) -> bool:
    """Return whether a model rejects thinking behind a changed prompt.

    Unknown Claude models of version 5.1 and later count as checking, and so do names without a version, such as
    ``claude-opus-latest``. If that's wrong, some thinking is lost. The other mistake would cost a refused request.
    """
    name = undated(model)
    if "claude" not in name:
        return False
    version = _VERSION.search(name)
    if version is None:
        return not re.search(r"claude-(?:instant|v\d)", name)
    family = next((family for family in _FIRST_CHECKED_BY_FAMILY if family in name), "")
    return (int(version[1]), int(version[2] or 0)) >= _FIRST_CHECKED_BY_FAMILY.get(family, _FIRST_CHECKED)
