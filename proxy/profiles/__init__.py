"""What is known of models: limits, tokenizer, and where each figure comes from."""

from proxy.profiles.lookup import Profiles, ProfileSettings
from proxy.profiles.profile import Profile

__all__ = ["Profile", "ProfileSettings", "Profiles"]
