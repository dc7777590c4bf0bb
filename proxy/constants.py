"""Constants that several packages share."""

from __future__ import annotations

import msgspec

__version__ = "0.2.0"  # only this line has the version

DOCUMENTATION = "https://compaction-proxy.example/"
"""The site of the documents, as in pyproject.toml. Messages name its pages, because packages don't include docs."""

DAY = 86_400  # Seconds
PICO = 10**12  # amounts of money are whole numbers of this part of a US dollar

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of ``msgspec`` about JSON that isn't valid, has lone surrogates, or is nested too deeply."""
