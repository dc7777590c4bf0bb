"""Warnings that depend on more than the file: the day, and the address that the proxy listens on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date

from proxy.config.checks import Finding
from proxy.config.issues import Issue, error_text
from proxy.config.loading import Loaded
from proxy.config.settings import Settings
from proxy.config.tree import dotted, line_of
from proxy.http.headers import LOOPBACK


def advice(loaded: Loaded, today: date) -> list[str]:
    """Return a line for each key that has expired. ``today`` is the day in UTC."""
    return _lines(sorted(_expired(loaded.settings, today), key=lambda found: line_of(loaded.root, found[0])), loaded)


def exposure(settings: Settings, loaded: Loaded | None) -> list[str]:
    """Return the warnings about listening on more than loopback.

    ``settings`` hold the effective host, which the command may override. ``loaded`` is the file they come from.
    """
    return _lines(_exposed(settings), loaded)


def _lines(findings: Iterable[Finding], loaded: Loaded | None) -> list[str]:
    texts = [(path, f"warning: {error_text(problem, fix, dotted(path))}") for path, problem, fix in findings]
    if loaded is None:
        return [text for _, text in texts]
    return loaded.sources.located(Issue(line_of(loaded.root, path), text) for path, text in texts)


def _exposed(settings: Settings) -> Iterator[Finding]:
    host = settings.server.host
    if host in LOOPBACK:
        return
    name = next((name for name, upstream in settings.upstreams.items() if upstream.spends), None)
    if settings.auth.mode == "open" and name is not None:
        problem = f"anyone who can reach {host} can spend the credentials of upstream '{name}'"
        yield ("auth", "mode"), problem, "auth: {mode: keys}, or publish the port to trusted callers only"
    if settings.store.kind != "memory" and settings.store.encryption.key is None:
        fix = (
            'store: {encryption: {key: "${COMPACTION_STORE_KEY}"}}. '
            "To store no originals, policies: {default: {archive: null}}"
        )
        problem = "the store holds the prompts of other machines' users unencrypted"
        yield ("store", "encryption", "key"), problem, fix


def _expired(settings: Settings, today: date) -> Iterator[Finding]:
    for name, team in settings.teams.items():
        for index, key in enumerate(team.keys):
            if key.expires is not None and key.expires <= today:
                yield ("teams", name, "keys", index), f"expired on {key.expires} (UTC) and is refused", "remove it"
