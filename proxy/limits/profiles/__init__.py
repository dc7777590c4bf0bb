"""What is known of models: limits, tokenizer, and where each figure comes from."""

from proxy.limits.profiles.lookup import Profiles, ProfileSettings
from proxy.limits.profiles.profile import Profile

__all__ = ["Profile", "ProfileSettings", "Profiles"]
