"""Connect to object storage: a bucket, a container, or a folder."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store

CONNECT_SECONDS = 2
REQUEST_SECONDS = 10
RETRIES = 1


def connect(url: str, options: Mapping[str, str]) -> tuple[ObjectStore, Path | None]:
    """Return a client for an address, and the folder if it is one. See ``ObjectsStore``."""
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        folder = Path(rest)
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        return LocalStore(folder, automatic_cleanup=True), folder
    bucket, _, path = rest.partition("/")
    common: dict[str, Any] = {
        "prefix": path.strip("/") or None,
        "client_options": {
            "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
            "timeout": timedelta(seconds=REQUEST_SECONDS),
            **({"allow_http": True} if options.get("endpoint", "").startswith("http:") else {}),
        },
        "retry_config": {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=REQUEST_SECONDS)},
    }
    config: dict[str, Any] = dict(options)
    makers: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    store: ObjectStore = makers[scheme](bucket, **common, **config)
    return store, None
