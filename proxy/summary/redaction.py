"""Redact secrets before a summary model reads them.

The proxy recognizes secrets by their form: keys of well-known services, tokens, private keys, credentials in URLs, and
values assigned to names like ``password``. Other random-looking text stays, because a summary must keep hashes, UUIDs,
and paths. Every expression is bounded and anchored by a literal, or possessive, so matching takes linear time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import regex  # type: ignore[import-untyped]
import structlog

log = structlog.get_logger(__name__)

REDACTED = "[redacted]"

TEXT_SECONDS = 0.5
"""CPU seconds that each of a policy's own expressions may take for one text."""

ALL_SECONDS = 5.0
"""CPU seconds that all of a policy's own expressions may take for one summary."""

# Keys by prefix. A key has a digit; a CSS class name like `sk-fading-circle` has none.
_KEYS = re.compile(
    r"""(?<![A-Za-z0-9])(?:
    sk-(?=[A-Za-z_-]{0,100}\d)[A-Za-z0-9_-]{20,}                  # OpenAI, Anthropic, OpenRouter, DeepSeek
  | (?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,} | whsec_[A-Za-z0-9+/=]{24,}                  # Stripe
  | gh[pousr]_[A-Za-z0-9]{30,} | github_pat_[A-Za-z0-9_]{40,}     # GitHub
  | glpat-[A-Za-z0-9_-]{20,}                                      # GitLab
  | (?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])                      # AWS
  | AIza[A-Za-z0-9_-]{35} | ya29\.[A-Za-z0-9_-]{20,} | GOCSPX-[A-Za-z0-9_-]{20,}          # Google
  | xox[abeoprs]-[A-Za-z0-9-]{10,} | xapp-\d-[A-Za-z0-9-]{10,}    # Slack
  | hf_[A-Za-z0-9]{30,} | gsk_[A-Za-z0-9]{40,} | xai-[A-Za-z0-9]{40,}                     # Hugging Face, Groq, xAI
  | npm_[A-Za-z0-9]{36} | pypi-AgE[A-Za-z0-9_-]{40,} | dop_v1_[0-9a-f]{64}
  | SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}                    # SendGrid
  | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){0,3}                      # JWT, JWE
    )""",
    re.VERBOSE,
)

_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[^-]*+(?:-(?!----)[^-]*+)*+-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    # A truncated key: match up to the end of the base64 lines.
    r"|(?:[A-Za-z0-9+/=]{16,}|\s|\\[nr])*+)"
)

_BEARER = re.compile(
    r"(?P<keep>\b(?:bearer|basic)[ \t]{1,4})(?=[^\s\"'`]{0,200}[\d=])[A-Za-z0-9._~+/=-]{16,}", re.IGNORECASE
)

# After `://`: user:password@, or a long token as the user. In the query: values of names like `token`.
_URL = re.compile(
    r"(?P<keep>://[^\s/:@\"'`<>]{0,100}:)(?!\$[{(]|<)[^\s/@\"'`<>]{1,200}(?=@)"
    r"|(?P<keep_token>://)(?=[^\s/@]{0,200}\d)[A-Za-z0-9_.~%-]{16,200}(?=@)"
    r"|(?P<keep_hook>://hooks\.slack\.com/services/)[A-Za-z0-9/]{16,}"
)
_QUERY = re.compile(
    r"(?P<keep>[?&][\w-]{0,30}(?:key|token|signature|sig|secret|password|auth|credential)=)"
    r"(?=[^\s&#\"'`<>]{0,200}\d)[^\s&#\"'`<>]{8,}",
    re.IGNORECASE,
)

_NAME = r"""(?:
    pass(?:word|wd|phrase|code)|pwd
  | (?:client[_-]?|app[_-]?)?secret
  | (?:api|access|secret|private|signing|encryption|account|shared|service|master|auth|subscription)[_-]?key
  | (?P<countable>(?:[_-]?auth|access|refresh|bearer|session|id|bot|api)?[_-]?token)
  | credentials? | authorization )"""
# A name with `token` may also be a count; then its value is a number.
_NO_COUNT = r"""(?(countable)(?!\d{1,12}(?:[\s.,;)\]}]|$)))"""

# Text in place of a value: types, placeholders, and references to a value elsewhere.
_NO_VALUE = r"""(?!
    (?:none|null|nil|true|false|str|string|text|bytes|bool|undefined|required|optional|missing|invalid|expired|wrong
     |incorrect|empty|unknown|hidden|passwd|value|yes|no|env|SecretStr|bearer|basic
     |\w{0,40}(?:password|secret|token|key|credentials?))
    (?=[\s"'`,;:.)\]}\\|=&?]|$)
  | \$[{(] | \$[A-Z_]{2} | \{\{ | \{[a-z_]{1,40}\} | %[({] | <[\w\ -]{1,60}> | \[redacted\] | \*{3}
  | x{3,}(?!\w) | \.{3}
  | https?:// | ~?\.{0,2}/(?:home|etc|usr|var|run|tmp|root|opt|mnt|srv|app|Users|workspace)\b | ~/ | [A-Z]:\\
  | (?:process\.env|os\.(?:environ|getenv)|getenv|env|config|settings|self|args|secrets|vault)[.(\[:]
    )"""

# An unquoted value has a digit or a symbol. A plain word counts as a value only at the end of a line.
_BARE = r"""(?:
    (?=[^\s"'`,;<>(){}\[\]&|]{0,100}[\d!@\#%^*+=~])(?:[^\s"'`,;<>(){}\[\]&|\\]|\\(?![nrt"'\\])){4,}+
  | [^\s"'`,;<>(){}\[\]&|\\\d.]{6,100}+(?=[ \t]{0,8}(?:\#[^\n]{0,200})?(?:\r?\n|\Z|\\n))
    )(?![(\[])"""

_ASSIGNED = re.compile(
    rf"""(?P<keep>
    {_NAME}
    (?: \\{{0,3}}["'`] \]? )?
    (?: [ \t]{{0,4}} (?: : [ \t]{{0,4}} [A-Za-z][\w.\[\]|\ ]{{0,40}}? )? [ \t]{{0,4}} (?: := | => | [:=] ) [ \t]{{0,4}}
      | [ \t](?:is|was)[ \t]
    )
    (?: (?:bearer|basic|token) [ \t]{{1,4}} )?
    (?P<quote>\\{{0,3}}["'`])?
    (?: (?:bearer|basic|token) [ \t]{{1,4}} )?
    )
    {_NO_VALUE}
    (?(quote) (?:(?!(?P=quote))(?:\\.|[^\n])){{4,2000}}+ | {_NO_COUNT} {_BARE} )""",
    re.VERBOSE | re.IGNORECASE,
)

_COMMAND = re.compile(
    r"(?P<keep>\s--?(?:password|passwd|token|api-key|secret|access-token|auth-token)[ \t]{1,4}[\"']?)"
    r"(?![-$<{\"'])[^\s\"']{4,200}"
    r"|(?P<keep_user>\bcurl [^\n]{0,300}?\s(?:-u|--user)[ \t]{0,4}[\"']?[^\s:\"']{1,100}:)(?![$<])[^\s\"']{1,200}",
    re.IGNORECASE,
)

# Each pattern with lowercase literals. The pattern runs only on texts that contain one of them.
_RULES: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (_PEM, ("private key",)),
    (_URL, ("://",)),
    (_KEYS, ()),
    (_BEARER, ("bearer", "basic")),
    (_QUERY, ("=",)),
    (_ASSIGNED, ("pass", "pwd", "secret", "key", "token", "credential", "authorization")),
    (_COMMAND, ("--", "curl")),
)


@dataclass(frozen=True, slots=True)
class Redaction:
    """Redact text that looks like a secret, if ``secrets`` is set, and matches of the ``own`` expressions."""

    secrets: bool
    own: OwnExpressions | None = None

    def __call__(self, text: str) -> str:
        """Replace each secret with ``[redacted]``. The names of the secrets stay."""
        if self.secrets:
            lower = text.lower()
            for pattern, needles in _RULES:
                if not needles or any(needle in lower for needle in needles):
                    text = pattern.sub(_blacked_out, text)
        return text if self.own is None else self.own(text)


class OwnExpressions:
    """A policy's own expressions, with a time limit per summary.

    A text can be crafted to make an expression slow, like ``\\s+$`` on a megabyte of white space. The proxy redacts
    such a text entirely.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(regex.compile(pattern) for pattern in patterns)
        self._left = ALL_SECONDS

    def __call__(self, text: str) -> str:
        """Replace each match with ``[redacted]``."""
        began = time.thread_time()
        try:
            for pattern in self._patterns:
                # Release the GIL so that other threads can run.
                text = pattern.sub(_blacked_out_whole, text, timeout=min(TEXT_SECONDS, self._left), concurrent=True)
        except TimeoutError:
            log.warning("redaction.too_slow", characters=len(text))
            text = REDACTED
        self._left = max(0.0, self._left - (time.thread_time() - began))
        return text


def redaction(*, secrets: bool, patterns: Sequence[str]) -> Redaction | None:
    """Return the redaction of a policy for one summary, or ``None`` if it redacts nothing."""
    if not secrets and not patterns:
        return None
    return Redaction(secrets, OwnExpressions(patterns) if patterns else None)


def _blacked_out(match: re.Match[str]) -> str:
    groups = match.groupdict()
    return "".join(text for name, text in groups.items() if name.startswith("keep") and text) + REDACTED


def _blacked_out_whole(match: re.Match[str]) -> str:
    # An expression like `(?=x)` can match an empty string, so there is nothing to redact.
    return REDACTED if match.group() else ""
