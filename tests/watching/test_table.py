"""The rows of an observation: the same as columns, as bytes and as a frame."""

import msgspec
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadPayload
from pipeline.records.schema import pack_frame
from pipeline.watching.observation import ANOMALIES, EVENTS, RATES
from pipeline.watching.table import ObservedTable, Schema

_VALUES = {
    pl.Int64: st.integers(-(2**63), 2**63 - 1),
    pl.UInt32: st.integers(0, 2**32 - 1),
    pl.UInt64: st.integers(0, 2**64 - 1),
    pl.Float64: st.floats(allow_nan=False),
    pl.String: st.text(max_size=5),
    pl.Boolean: st.booleans(),
}


@given(st.data(), st.sampled_from((RATES, EVENTS, ANOMALIES)), st.sampled_from((0, 1, 3, 300)))
def test_a_table_is_read_as_it_was_written_and_equals_its_frame(
    data: st.DataObject, schema: Schema, height: int
) -> None:
    few = [tuple(data.draw(st.none() | _VALUES[kind]) for kind in schema.types.values()) for _ in range(3)]
    rows = [few[number % 3] for number in range(height)]
    columns = map(list, zip(*rows, strict=True)) if rows else [[] for _ in schema.types]
    table = ObservedTable(schema, dict(zip(schema.types, columns, strict=True)))
    assert list(ObservedTable.unpack(schema, table.pack()).rows()) == rows
    assert table.frame().rows() == rows and ObservedTable.of(schema, table.frame()) == table
    # Both ways to write a table are read, whatever its height: the limit between them may move.
    assert bool(table) is (height > 0)
    if rows:
        assert ObservedTable.unpack(schema, pack_frame(table.frame())) == table


@pytest.mark.parametrize(
    "columns",
    [[[1], [2]], [[1], [2], [-1]], [["x"], [2], [3]], [[1, 2], [2], [3]], "xyz", [[1], [2], [3], [4]]],
)
def test_columns_of_other_types_or_lengths_are_damage(columns: object) -> None:
    with pytest.raises(BadPayload):
        ObservedTable.unpack(RATES, b"C" + msgspec.msgpack.encode(columns))


def test_a_frame_of_other_columns_is_damage() -> None:
    with pytest.raises(BadPayload):
        ObservedTable.unpack(RATES, pack_frame(pl.DataFrame({"minute": [1]})))
    with pytest.raises(BadPayload):
        ObservedTable.unpack(RATES, b"no table")
