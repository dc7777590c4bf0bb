"""The section `archive`: object storage for the archive."""

from __future__ import annotations

import importlib.util
import re
from typing import Literal

from pydantic import field_validator, model_validator

from proxy.config.fields import Section, Text, wrong

_BUCKET = re.compile(r"(s3|gs|az)://[a-z0-9][a-z0-9._-]{1,220}(/[\w.=-]+)*/?", re.ASCII)
_EXAMPLE = "url: s3://bucket/prefix"
_ENDPOINT = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")
_NAMES = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage", "file": "a folder"}


class ArchiveStoreSettings(Section):
    """Where to store the archive. Default: in the store."""

    url: str | None = None
    """Object storage for the archive: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, or
    file:///absolute/path. Credentials come from the environment. Default: the archive is in the store."""
    endpoint: Text | None = None
    """The address of a service that is compatible with S3. Default: AWS, or AWS_ENDPOINT_URL."""
    region: Text | None = None
    """The region of a bucket on S3. Default: AWS_REGION, or us-east-1."""

    @field_validator("url")
    @classmethod
    def _is_known(cls, url: str | None) -> str | None:
        if url is None:
            return None
        scheme, _, path = url.partition("://")
        if scheme not in _NAMES:
            raise wrong("must be s3://BUCKET, gs://BUCKET, az://CONTAINER, or file:///PATH", fix=_EXAMPLE)
        if scheme == "file":
            if not path.startswith("/") or path.strip("/") == "" or re.search(r"[?#%]|[^ -~\u00a1-\uffff]", path):
                raise wrong("must be file:///absolute/path without ?, #, or %", fix="url: file:///srv/archive")
        elif not _BUCKET.fullmatch(url) or {".", ".."} & set(path.split("/")):
            raise wrong(
                "must name a bucket and at most a prefix of letters, digits, and - _ . = /, without credentials",
                fix=f"{_EXAMPLE}, with the credentials in the environment",
            )
        if importlib.util.find_spec("obstore") is None:
            raise wrong("needs the package obstore", fix="run pip install 'obstore>=0.12'")
        return url

    @field_validator("endpoint")
    @classmethod
    def _is_an_address(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
            raise wrong("must be an address without credentials", fix="endpoint: https://minio.example.com:9000")
        return endpoint

    @model_validator(mode="after")
    def _has_a_bucket(self) -> ArchiveStoreSettings:
        for name in self.options:
            if self.kind != "s3":
                raise wrong("needs a url that starts with s3://", name, fix="remove it, or set archive.url to s3://…")
        return self

    @property
    def options(self) -> dict[str, str]:
        """Return the settings of the client, by name."""
        return {name: value for name in ("endpoint", "region") if (value := getattr(self, name)) is not None}

    @property
    def kind(self) -> Literal["s3", "gs", "az", "file"] | None:
        """Return the kind of storage, or ``None`` if the archive is in the store."""
        schemes: dict[str, Literal["s3", "gs", "az", "file"]] = {"s3": "s3", "gs": "gs", "az": "az", "file": "file"}
        return None if self.url is None else schemes[self.url.partition("://")[0]]

    @property
    def place(self) -> str:
        """Return the kind of storage in words."""
        return "the store" if self.kind is None else _NAMES[self.kind]
