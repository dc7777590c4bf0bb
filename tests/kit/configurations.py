"""Load configurations that tests write."""

from collections.abc import Mapping
from pathlib import Path

from proxy.config import Settings
from proxy.config.loading import attempt, from_assembly
from proxy.config.sources import Assembly, Source, Sources


def check(path: Path, environ: Mapping[str, str]) -> list[str]:
    """Return a line for each error of a configuration, or an empty list."""
    return attempt(path, environ).wrong.splitlines()


def loads(content: bytes, environ: Mapping[str, str]) -> Settings:
    """Return the settings of a file's content. Includes are relative to the working folder. Raises ``Issues``."""
    path = Path("configuration.yaml")
    return from_assembly(Assembly(Sources(path, (Source(path, content, owned=False),)), environ)).settings
