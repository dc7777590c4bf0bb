"""A reverse proxy that compacts conversations in flight. Only this file has its version."""

__version__ = "0.2.0"
