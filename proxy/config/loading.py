"""From a file to settings in force.

The steps: read, parse, put in the environment's variables, check each value, let policies inherit, check what goes
together. Each step reports everything it finds; the next one begins when there is nothing.
"""

from __future__ import annotations

from collections.abc import Mapping as Environ
from pathlib import Path

from pydantic import ValidationError

from proxy.config.checks import cross_check
from proxy.config.document import MAX_BYTES, parse
from proxy.config.environment import substitute
from proxy.config.faults import Fault, Faults
from proxy.config.inheritance import effective
from proxy.config.messages import faults_of
from proxy.config.settings import Settings, WrittenSettings
from proxy.config.tree import Mapping, plain
from proxy.errors import ConfigurationError


def load(path: Path | None, environ: Environ[str, str]) -> Settings:
    """The settings of a file, or the defaults without one.

    ``environ`` is where ``${NAME}`` is looked up. Raises ``errors.ConfigurationError``; its message has a line
    ``file:line: what is wrong: what to do`` for each fault.
    """
    if path is None:
        return Settings()
    try:
        return loads(_content(path), environ)
    except Faults as found:
        lines = [f"{path}:{fault.line}: {fault.message}" for fault in found.faults]
    raise ConfigurationError("\n".join(lines))


def check(path: Path, environ: Environ[str, str]) -> list[str]:
    """What is wrong with a file, a line for each fault; empty if it is fine."""
    try:
        load(path, environ)
    except ConfigurationError as error:
        return error.message.splitlines()
    return []


def loads(content: bytes, environ: Environ[str, str]) -> Settings:
    """The settings of a file's content. Raises ``Faults``."""
    root = substitute(parse(content), environ)
    written = _written(root)
    settings = Settings(
        **{name: getattr(written, name) for name in written.model_fields_set - {"policies"}},
        policies=effective(root, written.policies),
    )
    faults = cross_check(root, written, settings)
    if faults:
        raise Faults(faults)
    return settings


def _written(root: Mapping) -> WrittenSettings:
    try:
        return WrittenSettings.model_validate(plain(root))
    except ValidationError as error:
        faults: list[Fault] = faults_of(error, root, WrittenSettings)
    # Outside the handler: pydantic's error knows the values, secrets among them.
    raise Faults(faults)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
    raise ConfigurationError(f"{path}: can't be read ({reason}): give the path of a configuration file")
