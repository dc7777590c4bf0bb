"""Model profiles: limits, tokenizer, and the source of each figure."""

from proxy.limits.profiles.lookup import Profiles
from proxy.limits.profiles.profile import Profile

__all__ = ["Profile", "Profiles"]
