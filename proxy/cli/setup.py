"""Write a first configuration (`init`), and create keys for teams (`keys new`)."""

from __future__ import annotations

import hashlib
import os
import secrets
from datetime import date
from pathlib import Path

from proxy.errors import ConfigurationError

PROVIDERS = {
    "openai": ("openai", None, "OPENAI_API_KEY"),
    "anthropic": ("anthropic", None, "ANTHROPIC_API_KEY"),
    "openrouter": ("openrouter", None, "OPENROUTER_API_KEY"),
    "groq": ("groq", None, "GROQ_API_KEY"),
    "vllm": ("openai", "http://127.0.0.1:8000/v1", None),
    "llama.cpp": ("openai", "http://127.0.0.1:8080/v1", None),
    "ollama": ("openai", "http://127.0.0.1:11434/v1", None),
    "lm-studio": ("openai", "http://127.0.0.1:1234/v1", None),
}
"""The provider, its URL if it isn't LiteLLM's, and the environment variable with its key."""

_TEXT = """\
# All other settings have defaults: docs/configuration.md lists them.
#   compaction-proxy check {file}     find mistakes
#   compaction-proxy doctor --config {file}     test keys, upstreams, and files
#   compaction-proxy serve --config {file}

upstreams:
{upstreams}
policies:
  default:
    mode: enforce                 # shadow: only report, in `compaction-proxy report` and /compaction/
    trigger: {{fraction: 0.85}}     # compact at this share of the input that the model accepts
    keep: {{fraction: 0.10}}        # recent messages to keep unchanged

# Teams share a policy and have limits of their own. Create a key with: compaction-proxy keys new --team search
# auth: {{mode: keys}}
# teams:
#   search:
#     keys: ["sha256:…"]
#     limits: {{requests_per_minute: 600, spend: {{usd: 50, per: day}}}}
"""


def text_for(path: Path, providers: tuple[str, ...]) -> str:
    """Return a configuration for these providers, which is or will be in a file."""
    return _TEXT.format(file=path, upstreams="".join(_upstream(name) for name in providers))


def write(path: Path, text: str) -> None:
    """Write a configuration. Raises ``ConfigurationError`` if the file exists."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        raise ConfigurationError(f"{path}: exists already. Fix: choose another name, or remove the file") from None
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigurationError(f"{path}: can't be written ({reason}). Fix: choose another folder") from error
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)


def _upstream(name: str) -> str:
    provider, url, variable = PROVIDERS[name]
    lines = [f"  {name}:", f"    provider: {provider}"]
    if url is not None:
        lines.append(f"    base_url: {url}")
    if variable is not None:
        lines.append(f"    # api_key: ${{{variable}}}    # default: the caller's own key")
    return "\n".join(lines) + "\n"


PREFIX = "cp-"

RANDOM_BYTES = 32


def new_key() -> str:
    """Return a random key: the prefix and 43 letters, digits, ``-`` and ``_``."""
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def key_entry(key: str, expires: date | None) -> str:
    """Return the YAML entry for the key in a configuration."""
    digest = f'"sha256:{hashlib.sha256(key.encode()).hexdigest()}"'
    return digest if expires is None else f"{{hash: {digest}, expires: {expires}}}"


def announcement(key: str, team: str, expires: date | None) -> str:
    """Return the text that the command prints."""
    return f"""\
The key. It is shown only once and not stored. Give it to the team:

  {key}

Its hash, for the configuration. The team's other keys stay valid while they are listed:

teams:
  {team}:
    keys:
      - {key_entry(key, expires)}
"""
