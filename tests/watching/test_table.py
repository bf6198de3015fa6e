"""The rows of an observation: the same as columns, as bytes and as a frame."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadPayload
from pipeline.records.schema import RESULT_SCHEMA, pack_frame
from pipeline.watching.anomalies import ANOMALIES, ANOMALY_COLUMNS, anomaly_tables
from pipeline.watching.observation import EVENTS, RATES
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


_REASONS = ["error-severity: error", "marked", "new-template", "other", None]


def _anomalous(row: int, values: tuple[Any, ...]) -> dict[str, Any]:
    of, template, at, timed, lines, score, level, reason = values
    return {
        "of": of, "template_id": template,
        "timestamp": None if at is None else datetime.fromtimestamp(at, UTC), "timed": timed,
        "lines": lines, "score": score, "p_value": row / 99 if row % 3 else None, "level": level,
        "reasons": None if reason is None else [reason], "line": row, "anomalous": row % 4 > 0,
        "message": None if row % 3 else f"m{row}", "raw": f"raw {row}", "source": "s",
    }  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(1, 3), st.none() | st.integers(0, 5),
            st.sampled_from([None, True, False]), st.integers(0, 1), st.none() | st.sampled_from([0.25, 0.5]),
            st.sampled_from([None, "info", "warning", "error"]), st.sampled_from(_REASONS),
        ),
        max_size=30,
    )
)  # fmt: skip
def test_anomalous_rows_are_one_row_for_each_template(values: list[tuple[Any, ...]]) -> None:
    rows = [_anomalous(row, one) for row, one in enumerate(values)]
    schema = {name: RESULT_SCHEMA[name] for name in ANOMALY_COLUMNS} | {"of": pl.Int64}
    whole = pl.col("timestamp").is_not_null() & (pl.col("lines") > 0)
    anomalous = pl.DataFrame(rows, schema=schema).filter(pl.col("anomalous") & whole)
    found = anomaly_tables(anomalous, anomalous["of"].to_numpy()) if anomalous.height else {}
    wanted: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["anomalous"] and row["timestamp"] is not None and row["lines"]:
            wanted.setdefault((row["of"], row["template_id"]), []).append(row)
    assert sum(table.height for table in found.values()) == len(wanted)
    for of, table in found.items():
        assert table.frame().schema == ANOMALIES.types
        strength = [(row["score"] is None, row["score"] or 0.0, row["n"]) for row in table.named_rows()]
        assert strength == sorted(strength, reverse=True)
        for row in table.named_rows():
            assert row == _summed(row["template_id"], wanted[of, row["template_id"]])


def _summed(template: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of ANOMALIES of one template, row by row."""
    first = min(rows, key=lambda row: (row["timestamp"], row["line"]))
    times = [row["timestamp"].timestamp() * 1000 for row in rows if row["timed"] in (None, True)]
    arrivals = [row["timestamp"].timestamp() * 1000 for row in rows]
    grave = {3 if row["level"] == "error" or row["reasons"] == [_REASONS[0]] else 1 for row in rows}
    warned = {2 if row["level"] == "warning" or row["reasons"] == ["marked"] else 1 for row in rows}
    return {
        "template_id": template,
        "n": len(rows),
        "first": min(times or arrivals),
        "last": max(times or arrivals),
        "score": max((row["score"] for row in rows if row["score"] is not None), default=None),
        "p_value": min((row["p_value"] for row in rows if row["p_value"] is not None), default=None),
        "level": next(
            (name for name in ("error", "warning", "info") if any(row["level"] == name for row in rows)), None
        ),
        "severity": max(grave | warned),
        "text": first["message"] or first["raw"],
        "raw": first["raw"],
        "source": "s",
        "line": first["line"],
        "new": any(row["reasons"] == ["new-template"] for row in rows),
        "timed": bool(times),
    }
