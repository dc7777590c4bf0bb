"""Waiting for an event in another thread or process."""

import time
from collections.abc import Callable


def until(true: Callable[[], object], seconds: float = 30.0) -> bool:
    """Wait until a condition is true. Return whether it became true within the time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
