"""Model profiles: limits, tokenizer, and the source of each figure."""

from proxy.limits.profiles.lookup import Profile, Profiles

__all__ = ["Profile", "Profiles"]
