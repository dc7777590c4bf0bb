"""Long checks that aren't part of the test suite: ``python -m soak NAME``."""
