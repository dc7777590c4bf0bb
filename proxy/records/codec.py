"""Encode the records of requests and the ledger's rows for a store, encrypted if there are keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import structlog

from proxy.records.model import SUMS, LedgerLabels, LedgerSums
from proxy.store.sealing import AesGcmCodec, Unreadable
from proxy.telemetry.metrics import STORE_UNREADABLE
from proxy.telemetry.record import RequestRecord

log = structlog.get_logger(__name__)

_RECORD, _ROW = "record", "ledger"

_DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError)
"""Errors of a value that a store returned. Another version of the proxy may have written it, with other fields."""

LOGGED = 1_000
"""Unreadable rows that a process logs, each once."""

T = TypeVar("T")


class RecordCodec:
    """Values, and the names that tenants, teams, policies, and models have in the store.

    With keys, values are encrypted and names are keyed digests, as in ``SealedStore``.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Encrypt with the first of the ``keys``, 32 bytes each, and decrypt with all of them."""
        self._codecs = [AesGcmCodec(key) for key in keys]
        self._logged: set[str] = set()

    def record(self, record: RequestRecord) -> tuple[str, str, bytes]:
        """Return the codec's id, the tenant's name in the store, and the record's value."""
        return self._sealed(record.tenant, _RECORD, record.id, msgspec.msgpack.encode(record))

    def row(self, labels: LedgerLabels, source: str = "") -> tuple[str, str, str, bytes]:
        """Return the key of a ledger's row, the codec's id, the tenant's name in the store, and the row's value.

        Rows that were copied from a ``source`` have keys of their own.
        """
        plain = msgspec.msgpack.encode(labels)
        key = self.name("labels", plain.hex() + source) or ""
        return key, *self._sealed(labels.tenant, _ROW, key, plain)

    def open_record(self, tenant: str, codec: str, id: str, value: bytes) -> RequestRecord | None:
        """Return a stored record, or ``None`` if no key decrypts it or it's unreadable, which is logged."""
        plain = self._opened(tenant, _RECORD, codec, id, value)
        return None if plain is None else self.decoded(_RECORD, id, plain, RequestRecord)

    def open_row(self, tenant: str, codec: str, key: str, value: bytes) -> LedgerLabels | None:
        """Return the labels of a stored row, or ``None`` if no key decrypts them or they're unreadable."""
        plain = self._opened(tenant, _ROW, codec, key, value)
        return None if plain is None else self.decoded(_ROW, key, plain, LedgerLabels)

    def sums(self, key: str, amounts: Mapping[str, object]) -> LedgerSums:
        """Return the sums of a stored row. An amount that isn't an integer is logged, and counts as 0."""
        try:
            return msgspec.convert(amounts, LedgerSums, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return LedgerSums(*(self._amount(key, name, amounts.get(name, 0)) for name in SUMS))

    def _amount(self, key: str, name: str, amount: object) -> int:
        try:
            return msgspec.convert(amount, int, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.unreadable(_ROW, f"{key}.{name}")
            return 0

    def unreadable(self, kind: str, key: str) -> None:
        """Count a value that can't be read, and log it once."""
        STORE_UNREADABLE.inc()
        if len(self._logged) < LOGGED and key not in self._logged:
            self._logged.add(key)
            log.warning("records.entry_unreadable", kind=kind, key=key)

    def decoded(self, kind: str, key: str, value: bytes, form: type[T]) -> T | None:
        """Return a decoded value, or ``None`` if it's unreadable."""
        try:
            return msgspec.msgpack.decode(value, type=form)
        except _DAMAGED:
            self.unreadable(kind, key)
            return None

    def name(self, kind: str, name: str | None) -> str | None:
        """Return the name of a team, policy, or model in the store, by the first key."""
        return name if name is None or not self._codecs else self._codecs[0].name(kind, name)

    @property
    def ids(self) -> list[str]:
        """Return the ids of the codecs that decrypt, or an empty one without keys."""
        return [codec.id for codec in self._codecs] or [""]

    def names(self, kind: str, name: str) -> list[str]:
        """Return the names that a tenant, team, policy, or model has in the store."""
        if not self._codecs:
            return [name]
        return [codec.tenant(name) if kind == "tenant" else codec.name(kind, name) for codec in self._codecs]

    def _sealed(self, tenant: str, kind: str, key: str, value: bytes) -> tuple[str, str, bytes]:
        if not self._codecs:
            return "", tenant, value
        codec = self._codecs[0]
        name = codec.tenant(tenant)
        return codec.id, name, codec.seal((name, kind, key), value)

    def _opened(self, tenant: str, kind: str, codec_id: str, key: str, value: bytes) -> bytes | None:
        if not codec_id and not self._codecs:
            return value
        codec = next((codec for codec in self._codecs if codec.id == codec_id), None)
        if codec is None:
            return None
        try:
            return codec.open((tenant, kind, key), value)
        except (Unreadable, TypeError):
            self.unreadable(kind, key)
            return None
