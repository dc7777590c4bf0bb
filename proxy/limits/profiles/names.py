"""Normalize the names of a model.

``openai/gpt-5.2``, ``gpt-5-2``, ``GPT-5.2-2025-12-11``, ``us.openai.gpt-5.2``, and ``ft:gpt-5.2:org::id`` have the same
limits. ``plain`` removes the provider and the region, ``undated`` also the snapshot.
"""

from __future__ import annotations

import re
from functools import lru_cache

# Names come from clients. No model has a longer name.
LONGEST_NAME = 200

# ft:<base>:<organisation>:<name>:<id>
_FINE_TUNED = re.compile(r"^ft:([^:]+)(?::.*)?$")

# Routing hints of OpenRouter, which select a server and not another model.
_HINT = re.compile(r":(?:free|beta|extended|nitro|floor|online|thinking|exacto)$")

# Bedrock: <region>.<vendor>.<model>-v1:0, some without the colon part. In deepseek-v3, v3 belongs to the name.
_BEDROCK_VERSION = re.compile(r"(?:-v\d+:\d+|-\d+:\d+)$")
_BEDROCK_SHORT_VERSION = re.compile(r"^((?:claude|nova)-.+)-v\d$")
_BEDROCK_REGION = re.compile(r"^(?:us-gov|us|eu|apac|au|jp|ca|global)\.(?=[a-z])")
_VENDOR = re.compile(
    r"^(?:ai21|amazon|anthropic|cohere|google|meta|minimax|mistral|moonshotai|moonshot|nvidia|openai|qwen"
    r"|writer|xai|zai)\.(?=[a-z])|^databricks-"
)
_DEEPSEEK = re.compile(r"^deepseek\.(?=[rv]\d)")
_VERTEX_SUFFIX = re.compile(r"(?:-maas|@default|@latest)$")

# 5-2 and 5p2 for 5.2; not 4-0613 (a snapshot), 3-8b (a size), 4-32k (a window) or a part of 2025-08-07.
_SPLIT_VERSION = re.compile(r"(?<!\d)(?<!20\d\d-)(\d{1,2})[-p](\d{1,2})(?![0-9a-z.])(?!-\d\d(?!\d))")
_AZURE_35 = re.compile(r"^gpt-35(?=-|$)")

_DATE = re.compile(r"[-@](?:20\d{2}-\d{2}-\d{2}|20\d{6}|\d{2}-20\d{2})(?=$|-)")
_LATEST = re.compile(r"-latest$")


@lru_cache(maxsize=8192)
def plain(name: str) -> str:
    """Return the lowercase name without provider, region, routing hint, and fine-tuning. Snapshots stay."""
    name = name[:LONGEST_NAME].strip().lower()
    if match := _FINE_TUNED.match(name.rpartition("/")[2]):
        name = match[1]
    name = _HINT.sub("", name.rpartition("/")[2])
    name = _BEDROCK_REGION.sub("", name)
    name = _DEEPSEEK.sub("deepseek-", _VENDOR.sub("", name))
    name = _VERTEX_SUFFIX.sub("", _BEDROCK_VERSION.sub("", name))
    name = _BEDROCK_SHORT_VERSION.sub(r"\1", name)
    name = _AZURE_35.sub("gpt-3.5", name.replace("@", "-"))
    return _SPLIT_VERSION.sub(r"\1.\2", name)


@lru_cache(maxsize=8192)
def undated(name: str) -> str:
    """Return the ``plain`` name without the snapshot's date and ``-latest``."""
    stripped = _LATEST.sub("", _DATE.sub("", plain(name)))
    return stripped or plain(name)


def spelling(name: str) -> str:
    """Return the lowercase name without the path before it."""
    return name.strip().rpartition("/")[2].lower()
