"""Search texts for regular expressions in linear time, for any expression and any text.

pydantic includes Rust's regex engine, which never backtracks. It doesn't support look-around, backreferences, or
possessive quantifiers, because these need backtracking.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, core_schema

Search = Callable[[str], bool]
"""Return whether a pattern matches anywhere in a text. The text must come from ``whole``."""


class NotSearchable(ValueError):
    """The engine doesn't support an expression. The message is the engine's own."""


@lru_cache(maxsize=1024)
def search_for(pattern: str) -> Search:
    """Compile an expression. Raise ``NotSearchable`` if the engine doesn't support it."""
    try:
        checked = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex", strict=True))
    except SchemaError as error:
        raise NotSearchable(str(error).splitlines()[-1].strip().removeprefix("error: ")) from None
    return checked.isinstance_python


def whole(text: str) -> str:
    """Replace lone surrogates, which the engine can't read, with replacement characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
