"""Parse the body of a toy request, and rewrite it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec

from proxy.constants import UNDECODABLE
from proxy.dialects.request import NOTHING, Request, Wire, listed, lower, positive


class _Wire(Wire):
    turns: list[msgspec.Raw] | None = None
    abilities: msgspec.Raw = NOTHING
    longest: msgspec.Raw = NOTHING


_decoder = msgspec.json.Decoder(_Wire)


class ToyRequest(Request, eq=False):
    """A request as the client sent it. ``units`` are the bytes of each turn, unchanged."""

    OVERHEAD = ("abilities",)
    CONVERSATION = "turns"

    @classmethod
    def _read(cls, raw: bytes) -> Self | None:
        try:
            wire = _decoder.decode(raw)
        except UNDECODABLE:
            return None
        turns = wire.turns or []
        return cls(
            raw=raw,
            model=wire.model_name,
            stream=wire.streams,
            units=turns,
            sent=len(turns),
            max_output=positive(wire.longest),
            overhead=(bytes(wire.abilities),),
        )

    def _replace_units(self, fields: dict[str, msgspec.Raw], units: Sequence[bytes]) -> None:
        fields["turns"] = listed(units)

    def _lower_output(self, fields: dict[str, msgspec.Raw], most: int) -> None:
        lower(fields, ["longest"], most)
