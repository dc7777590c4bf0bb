"""Show a model's name in records, in logs, and on pages. The client may send any text there, even a key."""

from __future__ import annotations

import re

HIDDEN_MODEL = "(hidden)"
"""Replaces text that doesn't look like a model's name. No name that is shown has parentheses."""

_NAME = re.compile(r"[\w./:@+-]{1,128}", re.ASCII)

# Keys of providers by their prefix, JSON Web Tokens, and keys without any punctuation.
_KEY = re.compile(
    r"""(?:^|[/:@])(?:
        (?:sk|pk|rk)[-_] | eyJ[\w-]{8}
      | (?:gsk|xai|hf|r8|fw|csk|pplx|tvly|gh[pousr]|github_pat)[-_][A-Za-z0-9]{16} | (?:nvapi|glpat)-[\w-]{20}
      | AIza[\w-]{30} | (?:AKIA|ASIA)[A-Z0-9]{16}
    )
    | \A(?=\D*\d)[A-Za-z0-9]{32,}\Z""",
    re.ASCII | re.VERBOSE,
)


def shown_model(model: str) -> str:
    """Return a model's name, or ``HIDDEN_MODEL`` for text that isn't one or that looks like a key."""
    return model if _NAME.fullmatch(model) and not _KEY.search(model) else HIDDEN_MODEL
