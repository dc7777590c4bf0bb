"""From files to settings in force.

The steps: read, parse, put in the environment's variables, make one tree of all files, check each value, let policies
inherit, check what goes together. Each step reports everything it finds; the next one begins when there is nothing.
"""

from __future__ import annotations

from collections.abc import Mapping as Environ
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from proxy.config.assembly import Assembly
from proxy.config.checks import cross_check, warnings
from proxy.config.faults import Issue, Issues
from proxy.config.inheritance import effective
from proxy.config.messages import faults_of
from proxy.config.settings import Settings, WrittenSettings
from proxy.config.sources import Source, Sources, begun
from proxy.config.tree import Mapping, plain
from proxy.errors import ConfigurationError

_NOT_IN_FORCE = {"policies", "include"}
"""What is written, and is something else once it is in force, or nothing."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration that is right: its settings, its files, and what they state, by lines over all files.

    ``warnings`` has a line ``file:line: warning: setting: problem. Fix: …`` for each setting that is valid but probably
    not intended.
    """

    settings: Settings
    sources: Sources
    root: Mapping = field(repr=False)
    written: WrittenSettings = field(repr=False)
    warnings: tuple[str, ...]


def load(path: Path | None, environ: Environ[str, str]) -> Settings:
    """The settings of a file or folder, or the defaults without one.

    ``environ`` is where ``${NAME}`` is looked up. Raises ``errors.ConfigurationError``; its message has a line
    ``file:line: setting: problem. Fix: …`` for each error.
    """
    return Settings() if path is None else read(path, environ).settings


def read(path: Path, environ: Environ[str, str]) -> Loaded:
    """The same, with where everything stands. Raises ``errors.ConfigurationError``."""
    return assembled(begun(path), environ)


def assembled(sources: Sources, environ: Environ[str, str]) -> Loaded:
    """A configuration out of files that have been read. Raises ``errors.ConfigurationError``."""
    attempt = _attempt(sources, environ)
    if attempt.loaded is None:
        raise ConfigurationError(attempt.wrong)
    return attempt.loaded


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of reading a configuration that may be wrong, and then ``wrong`` says how.

    ``sources`` are its files, as far as they were found; ``None`` where there are none at all.
    """

    sources: Sources | None
    loaded: Loaded | None
    wrong: str


def attempt(path: Path, environ: Environ[str, str]) -> Attempt:
    """Read a configuration that may be wrong."""
    try:
        sources = begun(path)
    except ConfigurationError as error:
        return Attempt(None, None, error.message)
    return _attempt(sources, environ)


def _attempt(sources: Sources, environ: Environ[str, str]) -> Attempt:
    assembly = Assembly(sources, environ)
    try:
        loaded = _loaded(assembly)
    except Issues as found:
        return Attempt(assembly.sources, None, "\n".join(assembly.sources.told(found.faults)))
    except ConfigurationError as error:
        return Attempt(assembly.sources, None, error.message)
    return Attempt(loaded.sources, loaded, "")


def check(path: Path, environ: Environ[str, str]) -> list[str]:
    """What is wrong with a configuration, a line for each fault; empty if it is fine."""
    try:
        load(path, environ)
    except ConfigurationError as error:
        return error.message.splitlines()
    return []


def loads(content: bytes, environ: Environ[str, str]) -> Settings:
    """The settings of a file's content. What it includes is looked for in the working folder. Raises ``Faults``."""
    path = Path("configuration.yaml")
    return _loaded(Assembly(Sources(path, (Source(path, content, owned=False),)), environ)).settings


def _loaded(assembly: Assembly) -> Loaded:
    root = assembly.tree()
    written = _written(root)
    settings = Settings(
        **{name: getattr(written, name) for name in written.model_fields_set - _NOT_IN_FORCE},
        policies=effective(root, written.policies),
    )
    faults = cross_check(root, written, settings)
    if faults:
        raise Issues(faults)
    odd = [fault._replace(message=f"warning: {fault.message}") for fault in warnings(root, written, settings)]
    ignored = [
        f"{path}: warning: not read, because its name doesn't end in .yaml. Fix: mv {path.name} {path.stem}.yaml"
        for path in assembly.sources.ignored
    ]
    return Loaded(settings, assembly.sources, root, written, (*assembly.sources.told(odd), *ignored))


def _written(root: Mapping) -> WrittenSettings:
    try:
        return WrittenSettings.model_validate(plain(root))
    except ValidationError as error:
        faults: list[Issue] = faults_of(error, root, WrittenSettings)
    # Outside the handler: pydantic's error knows the values, secrets among them.
    raise Issues(faults)
