"""Count tokens of text, media, and tools without a network."""

from proxy.tokens.media import has_remote_media
from proxy.tokens.text import encoding

__all__ = ["encoding", "has_remote_media"]
