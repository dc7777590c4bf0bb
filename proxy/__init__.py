"""A reverse proxy that compacts conversations in flight, and its engine for Python programs.

``proxy.library`` has the engine's functions, which are loaded when they are used.
"""

from typing import TYPE_CHECKING, Any

from proxy.constants import __version__

if TYPE_CHECKING:
    from proxy.library import Compacted, Compaction, acompact, compact

_FUNCTIONS = ("Compacted", "Compaction", "acompact", "compact")

__all__ = ["Compacted", "Compaction", "__version__", "acompact", "compact"]


def __getattr__(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module 'proxy' has no attribute {name!r}")
    from proxy import library

    return getattr(library, name)
