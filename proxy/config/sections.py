"""Sections of a policy, which each feature declares next to its code.

``proxy.sections`` lists them. It's above the features, and ``config`` is below them, so ``config`` imports that list by
name when it first builds a model of policies. Sections of the engine are dataclasses (``EngineSettings``), and this
module makes pydantic models of them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import import_module
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from proxy.compaction.settings import Clause, EngineSettings, Trigger
from proxy.compaction.stages.stage import StageRules
from proxy.config.fields import Count, KeepField, Section, Text, TriggerField

if TYPE_CHECKING:
    from proxy.config.checks import Finding
    from proxy.config.settings import Settings, WrittenSettings

LIST = "proxy.sections"
"""The module with the list of all sections, ``SECTIONS``."""

S = TypeVar("S")
E = TypeVar("E", bound=EngineSettings)
M = TypeVar("M", bound=BaseModel)

Check = Callable[["WrittenSettings", "Settings"], Iterable["Finding"]]
"""Find settings that are valid alone but not together. Takes the configuration as written and in force."""


def nothing(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    return iter(())


@dataclass(frozen=True)
class PolicySection(Generic[S]):
    """A section of a policy.

    - ``name`` is its key in the file, and ``about`` its description in one line.
    - ``kind`` is the class with which code reads it: ``policy.section(kind)``.
    - ``model`` checks it, if that's another class.
    - ``nullable`` means that ``null`` turns it off. Then code reads ``policy.optional(kind)``.
    - ``apart`` are the settings that don't affect checkpoints and summaries. ``True``: all of them.
    - ``errors`` and ``warnings`` check it with other settings.
    - ``models`` returns the models that it names.
    """

    name: str
    kind: type[S]
    about: str
    nullable: bool = False
    apart: bool | frozenset[str] = False
    model: type[Section] | None = None
    errors: Check = nothing
    warnings: Check = nothing
    models: Callable[[S], Iterable[str | None]] = lambda section: ()

    @property
    def checked_by(self) -> type[Section]:
        """Return the model that checks the section. Raises ``TypeError`` if there is none."""
        model = self.model or self.kind
        if not issubclass(model, Section):
            raise TypeError(f"{model.__name__} isn't a section")
        return model

    @property
    def is_stage(self) -> bool:
        """Return whether it's a stage, whose omitted trigger and keep are the policy's."""
        return issubclass(self.kind, StageRules)

    def field(self) -> tuple[Any, FieldInfo]:
        """Return the type and the field of a policy. The default is the section with all of its defaults."""
        model = self.checked_by
        made: Any = Field(default=model(), description=self.about)
        return (model | None if self.nullable else model), made


class EngineSection(Section):
    """A section whose values are read as a dataclass of the engine."""

    kind: ClassVar[type[EngineSettings]]

    @property
    def value(self) -> EngineSettings:
        """Return the values for the engine."""
        return self.kind(**{name: getattr(self, name) for name in type(self).model_fields})


def engine_section(kind: type[E]) -> PolicySection[E]:
    """Return the section of a policy for settings of the engine. Only stages can be turned off."""
    hints = get_type_hints(kind, include_extras=True)
    made: dict[str, Any] = {}
    for one in fields(kind):
        hint, *about = get_args(hints[one.name])
        default: Any = (
            {"default": one.default} if one.default is not MISSING else {"default_factory": one.default_factory}
        )
        made[one.name] = (_checked(hint), Field(**default, description=about[0]))
    name = "".join(map(str.capitalize, kind.SECTION.split("_")))
    model = create_model(name, __base__=EngineSection, __doc__=kind.__doc__, __module__=kind.__module__, **made)
    model.kind, model.main = kind, kind.MAIN
    return PolicySection(kind.SECTION, kind, kind.ABOUT, nullable=issubclass(kind, StageRules), model=model)


_TYPES: Mapping[object, object] = {int: Count, str: Text, Trigger: TriggerField, Clause: KeepField}
"""The types of settings, with their checks, by the types that the engine uses."""


def _checked(hint: Any) -> Any:
    """Return a type with the checks of settings. Types in ``Annotated`` have their own checks."""
    if hint in _TYPES:
        return _TYPES[hint]
    inner = tuple(map(_checked, get_args(hint)))
    if not inner or get_origin(hint) is Annotated:
        return hint
    return Union[inner] if isinstance(hint, types.UnionType) else get_origin(hint)[inner]  # noqa: UP007 - made here


@cache
def sections() -> tuple[PolicySection[Any], ...]:
    """Return the sections of all features, in the order of a policy."""
    listed: tuple[PolicySection[Any], ...] = import_module(LIST).SECTIONS
    return listed


@cache
def names() -> Mapping[type[Any], str]:
    """Return the names of the sections, by the class that reads them."""
    return {section.kind: section.name for section in sections()}


@cache
def complete(model: type[M]) -> type[M]:
    """Return a model of policies with the sections of all features."""
    made: dict[str, Any] = {section.name: section.field() for section in sections()}
    return derived(model, **made)


def derived(model: type[M], **changed: Any) -> type[M]:
    """Return a model of the same name with some fields added or replaced."""
    made: type[M] = create_model(
        model.__name__, __base__=model, __doc__=model.__doc__, __module__=model.__module__, **changed
    )
    return made
