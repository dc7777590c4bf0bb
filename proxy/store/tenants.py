"""The tenants of callers without a key."""

from __future__ import annotations

SHARED_TENANT = "anonymous"
"""The tenant of callers without a key, if all of them count as one caller."""

UNSTORED_TENANT = "nobody"
"""The tenant of callers without a key otherwise. The proxy stores nothing that they send."""
