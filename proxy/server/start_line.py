"""Log the configuration that a server starts with, without secrets."""

from __future__ import annotations

from collections import Counter
from urllib.parse import urlsplit

import structlog

from proxy import __version__
from proxy.config import Loaded, Settings
from proxy.endpoints.status import configuration_hash

log = structlog.get_logger(__name__)


def log_start(settings: Settings, loaded: Loaded | None, address: str, workers: int, warnings: int) -> None:
    """Log one line. ``warnings`` is the number of warnings about the configuration."""
    modes = Counter(policy.mode for policy in settings.policies.values())
    log.info(
        "server.started",
        version=__version__,
        files=[] if loaded is None else [str(source.path) for source in loaded.sources.files],
        configuration=configuration_hash(settings),
        address=address,
        workers=workers,
        upstreams={name: _host(one.base_url) or one.provider for name, one in settings.upstreams.items()},
        store=_without_credentials(settings.store.url),
        archive=settings.archive.url,
        policies=dict(sorted(modes.items())),
        teams=len(settings.teams),
        warnings=warnings,
    )


def _host(url: str | None) -> str | None:
    return None if url is None else urlsplit(url).netloc


def _without_credentials(url: str) -> str:
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path.partition('?')[0]}"
