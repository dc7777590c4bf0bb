"""Make Hypothesis deterministic: every run uses the same examples.

``--full`` draws more of them, and ``--hypothesis-profile quick`` draws fewer.
"""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    max_examples=35,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", parent=settings.get_profile("deterministic"), max_examples=120)
settings.register_profile("quick", parent=settings.get_profile("deterministic"), max_examples=8)


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile before the test modules are imported."""
    profile = config.getoption("--hypothesis-profile") or "deterministic"
    settings.load_profile("full" if config.getoption("full") else profile)
