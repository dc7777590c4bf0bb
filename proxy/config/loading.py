"""Load files into settings in force.

The steps are: read, parse, substitute environment variables, merge all files, check each value, resolve policies, and
check across sections. Each step reports all of its errors. The next step runs only if there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from pydantic import ValidationError

from proxy.config.checks import cross_check, likely_mistakes
from proxy.config.document import Issues, Node, parse, plain
from proxy.config.messages import issues_of
from proxy.config.policy import Policy, effective
from proxy.config.settings import Settings, WrittenSettings
from proxy.config.sources import Assembly, Sources, files_at
from proxy.errors import ConfigurationError

_NOT_IN_FORCE = {"policies", "include"}  # settings of `WrittenSettings` that `Settings` omits or resolves


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid configuration: its settings, its files, and their tree, with lines counted over all files.

    ``warnings`` has a line ``file:line: warning: setting: problem. Fix: …`` for each setting that is valid but probably
    not intended.
    """

    settings: Settings
    sources: Sources
    root: Node = field(repr=False)
    written: WrittenSettings = field(repr=False)
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadAttempt:
    """The result of reading a configuration. ``wrong`` has the errors if it's invalid.

    ``sources`` has the files that were found, or ``None`` if there are none.
    """

    sources: Sources | None
    loaded: Loaded | None
    wrong: str


def load(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Return the settings of a file or folder, or the defaults without one.

    ``environ`` has the values of ``${NAME}``. Raises ``errors.ConfigurationError``; its message has a line
    ``file:line: setting: problem. Fix: …`` for each error.
    """
    return Settings() if path is None else read(path, environ).settings


def read(path: Path, environ: Mapping[str, str]) -> Loaded:
    """Return a configuration with its files and lines. Raises ``errors.ConfigurationError``."""
    return assembled(files_at(path), environ)


def assembled(sources: Sources, environ: Mapping[str, str]) -> Loaded:
    """Return the configuration in ``sources``. Raises ``errors.ConfigurationError``."""
    found = _attempt(sources, environ)
    if found.loaded is None:
        raise ConfigurationError(found.wrong)
    return found.loaded


def attempt(path: Path, environ: Mapping[str, str]) -> LoadAttempt:
    """Read a configuration that may be invalid."""
    try:
        sources = files_at(path)
    except ConfigurationError as error:
        return LoadAttempt(None, None, error.message)
    return _attempt(sources, environ)


def _attempt(sources: Sources, environ: Mapping[str, str]) -> LoadAttempt:
    assembly = Assembly(sources, environ)
    try:
        loaded = from_assembly(assembly)
    except Issues as found:
        return LoadAttempt(assembly.sources, None, "\n".join(assembly.sources.located(found.issues)))
    except ConfigurationError as error:
        return LoadAttempt(assembly.sources, None, error.message)
    return LoadAttempt(loaded.sources, loaded, "")


def policy_from(stated: Mapping[str, object]) -> Policy:
    """Return a policy with settings as in ``policies.NAME``. Raises ``errors.ConfigurationError``."""
    try:
        root = parse(msgspec.json.encode({"policies": {"default": stated}}))
        written = _written(root)
        policies = effective(root, written.policies)
        issues = cross_check(root, written, Settings(policies=policies))
        if issues:
            raise Issues(issues)
    except Issues as found:
        raise ConfigurationError("\n".join(issue.message for issue in found.issues)) from None
    return policies["default"]


def from_assembly(assembly: Assembly) -> Loaded:
    """Return the configuration of some files. Raises ``Issues`` and ``ConfigurationError``."""
    root = assembly.tree()
    written = _written(root)
    settings = Settings(
        **{name: getattr(written, name) for name in written.model_fields_set - _NOT_IN_FORCE},
        policies=effective(root, written.policies),
    )
    issues = cross_check(root, written, settings)
    if issues:
        raise Issues(issues)
    found = [
        *assembly.sources.located(likely_mistakes(root, written, settings)),
        *(
            f"{path}: warning: not read, because its name doesn't end in .yaml. Fix: mv {path.name} {path.stem}.yaml"
            for path in assembly.sources.ignored
        ),
    ]
    return Loaded(settings, assembly.sources, root, written, tuple(found))


def _written(root: Node) -> WrittenSettings:
    try:
        return WrittenSettings.model_validate(plain(root))
    except ValidationError as error:
        issues = issues_of(error, root, WrittenSettings)
    # Raise outside the handler, because pydantic's error contains the values, including secrets.
    raise Issues(issues)
