"""Measurements of the proxy. ``scripts/bench`` lists the commands."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

DATA = ROOT.parent / "shared" / "data"
"""Recorded sessions and the catalogue of errors aren't part of the project. They may be in a folder next to it."""
