"""Rows of an observation as lists by column.

Most observations have a few rows. Polars takes 0.3 ms to make a frame of them, and more to ask it. So there
is a frame only where there are many."""

from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Annotated, Any, Final, Self

import msgspec
import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.schema import pack_frame, unpack_frame

# Up to so many rows, columns as msgpack are packed in a tenth of the time of an Arrow stream, and not larger.
FEW_ROWS: Final = 256
# Begins such a table. No frame is so large that its size begins so.
_COLUMNS: Final = b"\0COLUMN\xff"
_FRAME_BYTES: Final = 64 << 20
_ENCODER: Final = msgspec.msgpack.Encoder()
# A list of each type, as msgspec checks it.
_LISTS: Final[Mapping[Any, Any]] = {
    pl.Int64: list[Annotated[int, msgspec.Meta(le=(1 << 63) - 1)] | None],
    pl.UInt32: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] | None],
    pl.UInt64: list[Annotated[int, msgspec.Meta(ge=0)] | None],
    pl.Float64: list[float | None],
    pl.String: list[str | None],
    pl.Boolean: list[bool | None],
    pl.List(pl.Int64): list[list[Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]]],
}


class Schema:
    """The columns of a table and their Polars types, in their order."""

    def __init__(self, types: Mapping[str, Any]) -> None:
        self.types = dict(types)
        # Polars makes a series of each list, which takes ten times as long as packing it.
        self.framed = not any(isinstance(kind, pl.List) for kind in types.values())
        lists: Any = tuple(_LISTS[kind] for kind in types.values())
        self.decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple[lists])

    def empty(self) -> "ObservedTable":
        return ObservedTable(self, {name: [] for name in self.types})


class ObservedTable:
    """Rows of a schema, immutable. They are lists by column, or a frame until somebody asks for a list."""

    __slots__ = ("_columns", "_frame", "schema")

    def __init__(self, schema: Schema, columns: Mapping[str, list[Any]]) -> None:
        """The lists are as long as each other."""
        self.schema = schema
        self._columns: Mapping[str, list[Any]] | None = columns
        self._frame: pl.DataFrame | None = None

    @classmethod
    def of(cls, schema: Schema, frame: pl.DataFrame) -> Self:
        """The columns of the schema in a frame."""
        columns = [frame.get_column(name) for name in schema.types]
        kinds = zip(columns, schema.types.values(), strict=True)
        return cls._framed(
            schema, pl.DataFrame([one if one.dtype == kind else one.cast(kind) for one, kind in kinds])
        )

    @classmethod
    def _framed(cls, schema: Schema, frame: pl.DataFrame) -> Self:
        """Of a frame that has these columns and types."""
        table = cls(schema, {})
        table._columns, table._frame = None, frame
        return table

    @property
    def columns(self) -> Mapping[str, list[Any]]:
        if self._columns is None:
            frame = self.frame()
            self._columns = {name: frame[name].to_list() for name in self.schema.types}
        return self._columns

    @property
    def height(self) -> int:
        if self._columns is None:
            return self.frame().height
        return len(next(iter(self._columns.values())))

    def __bool__(self) -> bool:
        return self.height > 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObservedTable):
            return NotImplemented
        return self.schema is other.schema and self.columns == other.columns

    def __hash__(self) -> int:
        return hash((tuple(self.schema.types), self.height))

    def __repr__(self) -> str:
        return f"ObservedTable({dict(self.columns)!r})"

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        return zip(*self.columns.values(), strict=True)

    def named_rows(self) -> Iterator[dict[str, Any]]:
        return map(dict, map(zip, repeat(tuple(self.columns)), self.rows()))

    def slice(self, begin: int, end: int) -> "ObservedTable":
        if self._columns is None:
            return ObservedTable._framed(self.schema, self.frame()[begin:end])
        return ObservedTable(self.schema, {name: values[begin:end] for name, values in self._columns.items()})

    def frame(self) -> pl.DataFrame:
        if self._frame is None:
            self._frame = pl.DataFrame(self._columns, schema=self.schema.types)
        return self._frame

    def pack(self) -> bytes:
        """Empty for a table without rows."""
        if not (height := self.height):
            return b""
        if height > FEW_ROWS and self.schema.framed:
            return pack_frame(self.frame())
        return _COLUMNS + _ENCODER.encode(list(self.columns.values()))

    @classmethod
    def unpack(cls, schema: Schema, blob: bytes) -> Self:
        """The inverse of `pack`. Raises BadPayload."""
        if blob.startswith(_COLUMNS):
            try:
                columns = schema.decoder.decode(blob[len(_COLUMNS) :])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
                raise BadPayload(f"a table of an observation is not readable: {exc}") from exc
            if len(set(map(len, columns))) > 1:
                raise BadPayload("a table of an observation has columns of several lengths")
            return cls(schema, dict(zip(schema.types, columns, strict=True)))
        if not blob:
            return cls(schema, {name: [] for name in schema.types})
        frame = unpack_frame(blob, max_bytes=_FRAME_BYTES)
        if dict(frame.schema) != schema.types:
            raise BadPayload(f"a table of an observation has the columns {dict(frame.schema)}")
        return cls._framed(schema, frame)
