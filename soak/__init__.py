"""Long checks that aren't part of the test suite. ``scripts/soak`` lists them."""
