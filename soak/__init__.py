"""Long checks that are no part of the suite: ``python -m soak NAME``."""
