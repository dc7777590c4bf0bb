"""Count tokens of text, media, and tools without a network."""

from proxy.tokens.encodings import encoding
from proxy.tokens.media import has_remote_media

__all__ = ["encoding", "has_remote_media"]
