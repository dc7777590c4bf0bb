"""Counting tokens the way a model's provider would."""

from proxy.tokens.encodings import encoding
from proxy.tokens.media import has_remote_media
from proxy.tokens.messages import Counter, key_of

__all__ = ["Counter", "encoding", "has_remote_media", "key_of"]
