"""The recorded faults of samples/: the line that an operator would call the cause leads its incident."""

import io
import json
import re
from pathlib import Path

import polars as pl
import pytest
import zstandard

from bench.first_minutes import CAUSES
from pipeline import detect
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.models.severity import severity_words
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Meta
from pipeline.records.verdict import Verdict
from pipeline.report import findings
from pipeline.report.findings import Finding
from pipeline.sources.framing import Framer
from tests.report.test_findings import START, templates

SAMPLES = Path(__file__).resolve().parents[2] / "samples"


@pytest.fixture(scope="module")
def incidents(tmp_path_factory: pytest.TempPathFactory) -> list[list[Finding]]:
    """The incidents of all labelled lines, each masked line as a new template of its own."""
    labels = json.loads((SAMPLES / "labels.json").read_text(encoding="utf-8"))
    labelled: dict[str, set[int]] = {}
    for fault in labels["faults"]:
        for line in fault["lines"]:
            labelled.setdefault(line["file"], set()).add(line["line"])
    results, ids = tmp_path_factory.mktemp("results"), dict[str, int]()
    for name, numbers in labelled.items():
        workload = Path(name).name.partition(".")[0]
        (results / f"workload={workload}").mkdir()
        rows = _rows(SAMPLES / name, numbers, workload, ids)
        rows.write_parquet(results / f"workload={workload}" / "b.parquet")
    found = findings.collect(results, templates(*((number, text) for text, number in ids.items())))
    return findings.by_incident(found)


def _rows(path: Path, numbers: set[int], workload: str, ids: dict[str, int]) -> pl.DataFrame:
    packed = next(p for p in (path, path.with_name(path.name + ".zst")) if p.exists()).read_bytes()
    lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(packed), encoding="utf-8")
    framer = Framer()
    # The first line says when the file begins: what a program says as it starts leads nothing.
    wanted = [line.rstrip("\n") for number, line in enumerate(lines, start=1) if number in {1, *numbers}]
    records = pl.concat([framer.feed(wanted), framer.flush()])
    meta = Meta(
        batch_id="b",
        source=path.name,
        source_key="00aa",
        purpose=Purpose.SCORE,
        arrived=START,
        formats=(),
        zone="UTC",
    )
    prepared = detect.prepare(records, meta, MaskSet.load())
    work = detect.distinct(prepared, "m1")
    verdicts = {}
    for key, masked in work.select("key", "masked").iter_rows():
        word = severity_words(masked)
        verdicts[key] = Verdict(
            template_id=ids.setdefault(masked, len(ids) + 1),
            score=0.9,
            anomalous=True,
            reasons=("new-template", *([f"error-severity:{word}"] if word else [])),
        )
    rows = detect.result_rows(prepared, detect.answer(work, verdicts), meta, workload)
    return rows.with_columns(anomalous=(pl.col("line") > 1) | (1 in numbers))


@pytest.mark.parametrize("fault", CAUSES)
def test_the_cause_of_every_recorded_fault_leads_its_incident(
    incidents: list[list[Finding]], fault: str
) -> None:
    cause = re.compile(CAUSES[fault])
    assert any(cause.search(members[0].samples[0].message) for members in incidents), [
        [f.template[:80] for f in members[:3]] for members in incidents
    ]


def test_every_recorded_fault_is_an_incident_of_its_own(incidents: list[list[Finding]]) -> None:
    assert len(incidents) == len(CAUSES)
