"""The lines around findings: what stands before and after the first sample of each in its source."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import polars as pl

from pipeline.report.findings import Finding
from pipeline.sinks.answers.around import texts_around
from pipeline.sinks.answers.folder import engine_over, files_in
from pipeline.sinks.answers.lines import near_lines

RECORDS: Final = 5  # before and after
FINDINGS: Final = 200  # with neighbours; a reader stops earlier
CHARS: Final = 400  # of a neighbour


def with_neighbours(results: Path, findings: Sequence[Finding], *, records: int = RECORDS) -> list[Finding]:
    """The findings; the first sample of each has its neighbours, each cut at CHARS characters.

    Findings in sessions and rates stand in no line, so they have none. Raises BadPayload when a file is
    damaged."""
    firsts = [f.samples[0] for f in findings[:FINDINGS] if f.samples and f.template_id >= 0]
    hits = pl.DataFrame(
        [(sample.record_id, sample.source, sample.line) for sample in firsts],
        schema={"record_id": pl.String, "source": pl.String, "line": pl.UInt64},
        orient="row",
    )
    columns = ("record_id", "source", "line", "raw")
    with engine_over(results) as engine:
        neighbours = near_lines(engine, files_in(results), hits, records, columns)
    found = texts_around(neighbours, hits, records)
    return [_with(finding, found) for finding in findings]


def _with(finding: Finding, found: dict[str, tuple[list[str], list[str]]]) -> Finding:
    if not finding.samples or finding.samples[0].record_id not in found:
        return finding
    before, after = found[finding.samples[0].record_id]
    first = replace(finding.samples[0], before=_cut(before), after=_cut(after))
    return replace(finding, samples=(first, *finding.samples[1:]))


def _cut(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text if len(text) <= CHARS else text[: CHARS - 1] + "…" for text in texts)
