"""Hypothesis is deterministic here: the same examples on every run."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "deterministic", derandomize=True, deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("deterministic")
