"""Lines read = lines stored, for every file of the labelled sets and the samples, through the whole
pipeline."""

import zipfile
from pathlib import Path
from typing import Any

import polars as pl
import zstandard

from bench._running import scratch, watched_run

SAMPLES = Path(__file__).resolve().parents[1] / "samples"


def physical_lines(blob: bytes) -> int:
    """As an editor counts: newlines, plus a last line without one."""
    return blob.count(b"\n") + (not blob.endswith(b"\n") and bool(blob))


def measure(data: Path) -> dict[str, Any]:
    with scratch() as folder:
        wanted: dict[str, int] = {}
        inputs = sorted((data / "loghub_2k").glob("*/*.log"))
        for archive in sorted((data / "trainticket").rglob("*.zip")):
            inputs += _unpacked(archive, folder / archive.stem)
        for path in inputs:
            wanted[str(path)] = physical_lines(path.read_bytes())
        for path in sorted(SAMPLES.glob("*/*.zst")):
            inputs.append(path)
            with path.open("rb") as file:
                wanted[str(path)] = physical_lines(zstandard.ZstdDecompressor().stream_reader(file).read())
        run = watched_run([str(p) for p in inputs], folder / "out")
        rows = pl.scan_parquet(folder / "out/results/**/*.parquet", hive_partitioning=False)
        stored = (
            rows.group_by("source")
            .agg(pl.col("lines").sum(), pl.col("record_id").n_unique(), pl.len())
            .collect()
        )
    found = {source: (lines, unique, n) for source, lines, unique, n in stored.iter_rows()}
    wrong = {
        Path(source).name: {"read": lines, "stored": found.get(source, (0, 0, 0))[0]}
        for source, lines in wanted.items()
        if found.get(source, (0, 0, 0))[0] != lines
    }
    return {
        "files": len(wanted),
        "lines_read": sum(wanted.values()),
        "lines_stored": sum(lines for lines, _, _ in found.values()),
        "doubled_record_ids": sum(n - unique for _, unique, n in found.values()),
        "files_with_a_difference": len(wrong),
        "differences": wrong,
        "seconds": run.seconds,
        "peak_rss_mib": run.peak_rss_mib,
    }


def _unpacked(archive: Path, folder: Path) -> list[Path]:
    with zipfile.ZipFile(archive) as packed:
        names = [n for n in packed.namelist() if n.endswith(".log")]
        return [Path(packed.extract(n, folder)) for n in names]
