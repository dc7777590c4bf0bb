"""Warnings that depend on more than the file: the day, and the address that the proxy listens on."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

from proxy.config.faults import Issue, said
from proxy.config.loading import Loaded
from proxy.config.settings import Settings
from proxy.config.tree import Path, find
from proxy.http.hosts import LOOPBACK


def advice(loaded: Loaded, today: date) -> list[str]:
    """Return a line for each warning. ``today`` is the day in UTC."""
    return loaded.sources.told(sorted(_expired(loaded, today)))


def exposure(settings: Settings, loaded: Loaded | None) -> list[str]:
    """Return the warnings about listening on more than loopback.

    ``settings`` hold the effective host, which the command may override. ``loaded`` is the file they come from.
    """
    findings = list(_exposed(settings))
    if loaded is None:
        return [f"warning: {message}" for _, message in findings]
    return loaded.sources.told(Issue(find(loaded.root, path)[1], f"warning: {message}") for path, message in findings)


def _exposed(settings: Settings) -> Iterator[tuple[Path, str]]:
    host = settings.server.host
    if host in LOOPBACK:
        return
    keyed = next((name for name, upstream in settings.upstreams.items() if upstream.spends), None)
    if settings.auth.mode == "open" and keyed is not None:
        yield (
            ("auth", "mode"),
            said(
                f"anyone who can reach {host} can spend the credentials of upstream '{keyed}'",
                "auth: {mode: keys}, or publish the port to trusted callers only",
                "auth.mode",
            ),
        )
    if settings.store.path is not None and settings.store.encryption.key is None:
        yield (
            ("store", "encryption", "key"),
            said(
                "the store holds the prompts of other machines' users unencrypted",
                'store: {encryption: {key: "${COMPACTION_STORE_KEY}"}}. '
                "To store no originals, policies: {default: {archive: null}}",
                "store.encryption.key",
            ),
        )


def _expired(loaded: Loaded, today: date) -> Iterator[Issue]:
    for name, team in loaded.settings.teams.items():
        for index, key in enumerate(team.keys):
            if key.expires is not None and key.expires <= today:
                _, line, _ = find(loaded.root, ("teams", name, "keys", index))
                message = said(
                    f"expired on {key.expires} (UTC) and is refused", "remove it", f"teams.{name}.keys[{index}]"
                )
                yield Issue(line, f"warning: {message}")
