"""A reverse proxy that compacts conversations in flight. Only this file has its version."""

__version__ = "0.1.0"
