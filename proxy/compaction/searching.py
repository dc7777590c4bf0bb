"""Whether a regular expression is found in a text, in time proportional to the text's length, whatever both are.

The engine is Rust's, as pydantic has it for its own checks: it never goes back, so no text is slow. It knows no
look-around, no backreferences and nothing possessive, which need going back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, core_schema

Search = Callable[[str], bool]
"""Whether something is found anywhere in a text that ``whole`` has seen."""


class NotSearchable(ValueError):
    """An expression that the engine can't take; the message is the engine's own."""


@lru_cache(maxsize=1024)
def search_for(pattern: str) -> Search:
    """A search for an expression. Raises ``NotSearchable``."""
    try:
        checked = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex", strict=True))
    except SchemaError as error:
        raise NotSearchable(str(error).splitlines()[-1].strip().removeprefix("error: ")) from None
    return checked.isinstance_python


def whole(text: str) -> str:
    """The text as the engine can read it: halves of characters become replacement characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
