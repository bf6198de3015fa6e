"""The lines around a finding are those of its source, by line number."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records.schema import RESULT_SCHEMA
from pipeline.report.around import CHARS, with_neighbours
from pipeline.report.findings import Finding, FindingSample, collect
from pipeline.sinks.answers.around import texts_around

FIRST = datetime(2026, 11, 20, 10, tzinfo=UTC)


def row(line: int, key: str = "a", **changes: Any) -> dict[str, Any]:
    return dict.fromkeys(RESULT_SCHEMA) | {
        "record_id": f"{key}-{line}", "source": f"{key}.log", "line": line, "lines": 1, "workload": "app",
        "timestamp": FIRST + timedelta(seconds=line), "timed": True, "message": f"{key} {line}",
        "raw": f"{key} {line}", "template_id": 1, "pattern_id": 1, "anomalous": False, "score": 0.0,
    } | changes  # fmt: skip


def stored(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "results" / "a.parquet"
    path.parent.mkdir(parents=True)
    pl.DataFrame(rows, schema=RESULT_SCHEMA).write_parquet(path)
    return path.parent


def test_a_finding_has_five_records_of_its_source_on_each_side(tmp_path: Path) -> None:
    rows = [row(n) for n in range(1, 31)] + [row(n, key="b") for n in range(1, 31)]
    rows[19] |= {"anomalous": True, "score": 1.0, "template_id": 2, "reasons": ["new-template"]}
    rows[30] |= {"anomalous": True, "score": 1.0, "template_id": 3, "reasons": ["new-template"]}
    results = stored(tmp_path, rows)
    templates = pl.DataFrame({"template_id": [1, 2, 3], "template": ["a", "b", "c"]})
    found = with_neighbours(results, collect(results, templates))
    near = {f.template_id: (f.samples[0].before, f.samples[0].after) for f in found}
    assert near[2] == (tuple(f"a {n}" for n in range(15, 20)), tuple(f"a {n}" for n in range(21, 26)))
    assert near[3] == ((), tuple(f"b {n}" for n in range(2, 7)))


def test_long_neighbours_are_cut_and_findings_of_sessions_have_none(tmp_path: Path) -> None:
    results = stored(tmp_path, [row(1, raw="x" * 5_000), row(2)])
    sample = FindingSample(source="a.log", line=2, timestamp=FIRST, message="m", raw="m", record_id="a-2")

    def finding(template_id: int) -> Finding:
        return Finding(
            workload="app", template_id=template_id, template="t", count=1, lines=1, first_seen=FIRST,
            last_seen=FIRST, burst_end=FIRST, level=None, score=1.0, reasons=(), samples=(sample,), patterns=1,
        )  # fmt: skip

    (line,) = with_neighbours(results, [finding(4)])
    assert [len(text) for text in line.samples[0].before] == [CHARS]
    (session,) = with_neighbours(results, [finding(-5)])
    assert session.samples[0].before == ()


@given(hits=st.sets(st.integers(0, 40), min_size=1, max_size=5), records=st.integers(1, 6))
def test_each_hit_has_its_own_neighbours(hits: set[int], records: int) -> None:
    frame = pl.DataFrame([row(n) for n in range(41)], schema=RESULT_SCHEMA)
    asked = frame.filter(pl.col("line").is_in(hits)).select("record_id", "source", "line")
    found = texts_around(frame, asked, records)
    assert found == {
        f"a-{hit}": (
            [f"a {n}" for n in range(max(0, hit - records), hit)],
            [f"a {n}" for n in range(hit + 1, min(41, hit + records + 1))],
        )
        for hit in hits
    }
