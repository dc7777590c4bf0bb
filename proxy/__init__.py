"""A reverse proxy that compacts conversations in flight, and its engine for Python programs.

Only this file has the version. ``proxy.library`` has the engine's functions, which are loaded when they are used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxy.library import Compacted, Compaction, acompact, compact

__all__ = ["Compacted", "Compaction", "acompact", "compact"]

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'proxy' has no attribute {name!r}")
    from proxy import library

    return getattr(library, name)
