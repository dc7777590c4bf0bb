"""An OpenAI-compatible reverse proxy that compacts conversations in flight."""

__version__ = "0.1.0"
