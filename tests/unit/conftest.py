"""Make Hypothesis deterministic: every run uses the same examples. ``--full`` draws more of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", parent=settings.get_profile("deterministic"), max_examples=120)


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile before the test modules are imported."""
    settings.load_profile("full" if config.getoption("full") else "deterministic")
