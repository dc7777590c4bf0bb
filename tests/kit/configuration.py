"""Builders for configurations."""

from textwrap import dedent

from proxy.config.document import Issue, Issues
from tests.kit.configurations import loads


def errors_in(text: str | bytes, environ: dict[str, str] | None = None) -> list[Issue]:
    """Return the errors of a file's content, without masking."""
    content = text if isinstance(text, bytes) else dedent(text).lstrip("\n").encode()
    try:
        loads(content, environ or {})
    except Issues as found:
        return found.issues
    return []
