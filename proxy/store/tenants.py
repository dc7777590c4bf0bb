"""The tenants of callers without a key."""

from __future__ import annotations

SHARED_TENANT = "anonymous"
"""The tenant of callers without any key, if they count as one caller."""

UNSTORED_TENANT = "nobody"
"""Their tenant if they don't: the proxy stores nothing that they send."""
