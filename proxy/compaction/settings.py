"""Settings of the engine, declared as dataclasses next to the code that reads them.

The engine doesn't check settings and doesn't import a library for it. ``config`` makes a section of a policy of each
class: whole numbers must be positive, and texts mustn't be empty. The text in ``Annotated`` describes a setting to
users, with its unit and limits. So a setting has one place, one default, and one description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """A section of a policy that the engine reads. The docstring of a subclass describes the section to users.

    - ``SECTION`` is its name in a policy.
    - ``ABOUT`` describes the setting that holds it, in one line.
    - ``MAIN`` is the setting that a plain value in the place of the section probably means.
    """

    SECTION: ClassVar[str]
    ABOUT: ClassVar[str]
    MAIN: ClassVar[str | None] = None


@dataclass(frozen=True, slots=True)
class UserMessageRules(EngineSettings):
    """The user's earlier messages, which stay verbatim next to a summary."""

    SECTION: ClassVar[str] = "user_messages"
    ABOUT: ClassVar[str] = "The user's earlier messages, which stay verbatim next to a summary."
    MAIN: ClassVar[str | None] = "max_tokens"

    max_tokens: Annotated[int, "Maximum tokens of these messages: the first one, then the newest."] = 20_000
    keep_first: Annotated[bool, "Always keep the user's first message."] = True


@dataclass(frozen=True, slots=True)
class IndexRules(EngineSettings):
    """The list of paths, URLs, and ids from the summarized messages."""

    SECTION: ClassVar[str] = "index"
    ABOUT: ClassVar[str] = "The list of paths, URLs, and ids from the summarized messages."
    MAIN: ClassVar[str | None] = "max_tokens"

    max_tokens: Annotated[int, "Maximum tokens of the list."] = 2000
