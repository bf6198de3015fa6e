"""Raw lines to template ids in one process, ours in columns beside Drain3 line by line with the same masks:
lines/s.

The sets are raw files, headers and all; those of 2,000 lines, a fifth of a batch, are cycled with varied
parameters. Ours is the real path from bytes on: lines cut, records joined, header split (time, level, host,
...), masked, the distinct masked lines hashed and looked up in the verdict cache of the process, a template
id on every record; batches as a file source makes them, on the one Polars thread of a worker. Its templates
and the format are known, and masking has seen a copy of the set in which every digit of an id or a number is
another one (bench/_varied.py), as in a stream that runs; a round remembers nothing of the rounds before it.
`cold_ratio` is that of a first batch: masking has seen nothing. Drain3 gets the messages without their
headers, cleaned, and has learnt its templates from these very lines: what is timed is
`TemplateMiner.add_log_message` alone, on one thread, as it is made."""

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import polars as pl
import redis
from drain3 import TemplateMiner

from bench._drain3 import miner
from bench._varied import varied
from pipeline import detect
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.masking.multiline import cleaned
from pipeline.drain.templates import DEPTH, PER_WORKLOAD, Templates
from pipeline.drain.verdicts import Verdicts
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Meta
from pipeline.records.verdict import UNCLASSIFIED, Verdict
from pipeline.settings import Settings
from pipeline.sources import formats
from pipeline.sources.chunks import Assembly, Chunk, Cursor
from pipeline.sources.files import BLOCK_BYTES
from pipeline.sources.framing import Framer
from pipeline.sources.lines import LineCutter

ROUNDS: Final = 5
SEEN: Final = 1_000  # number of the cycle that masking has seen
LINES: Final = 100_000  # of a set, at most
SAMPLE: Final = 5_000  # lines of a set that Drain3 gets, evenly spaced: its speed is that of a line
CYCLES: Final = 10  # of a set of 2,000 lines, which is less than a batch, each with other parameters
LOGHUB: Final = ("Hadoop", "OpenSSH", "Zookeeper")
VERSION: Final = "bench"


class _Verdicts(Verdicts):
    """The cache of a process, with a dict where Redis is, which it asks for every template once."""

    def __init__(self, known: dict[int, Verdict], settings: Settings) -> None:
        super().__init__(redis.Redis(), settings)  # nothing connects before it is asked
        self.known = known

    def _from_redis(self, version: str, keys: Sequence[int]) -> dict[int, Verdict]:  # noqa: ARG002
        return {key: self.known[key] for key in keys if key in self.known}


def measure(data: Path) -> dict[str, Any]:
    masks, settings = MaskSet.load(), Settings()
    if pl.thread_pool_size() != 1:
        return _as_a_worker(data, 1)
    found = {name: compare(text, masks, settings) for name, text in sets(data)}
    ratios = [values["ratio"] for values in found.values()]
    return {
        "threads": pl.thread_pool_size(),
        "datasets": found,
        "min_ratio": min(ratios),
        "median_ratio": round(median(ratios), 1),
    }


def _as_a_worker(data: Path, threads: int) -> dict[str, Any]:
    """The same in a process that has the threads of a worker: Polars asks for them when it is imported."""
    words = [sys.executable, "-m", "bench", "frontend", "--json", "--data", str(data)]
    env = os.environ | {"POLARS_MAX_THREADS": str(threads)}
    found: dict[str, Any] = json.loads(
        subprocess.run(words, env=env, stdout=subprocess.PIPE, check=True).stdout
    )
    return found


def sets(data: Path) -> Iterator[tuple[str, bytes]]:
    """Name and raw text, headers and all."""
    yield "HDFS", gzip.decompress((data / "hdfs" / "HDFS_20000.log.gz").read_bytes())
    yield "BGL", gzip.decompress((data / "bgl" / "BGL_100k.log.gz").read_bytes())
    with zipfile.ZipFile(data / "trainticket" / "normal" / "F02normal01.zip") as archive:
        yield "TrainTicket", archive.read(next(n for n in archive.namelist() if n.endswith(".log")))
    for system in LOGHUB:
        path = data / "loghub_2k" / system / f"{system}_2k.log"
        yield system, "".join(f"{line}\n" for cycle in range(CYCLES) for line in varied(path, cycle)).encode()


def compare(text: bytes, masks: MaskSet, settings: Settings) -> dict[str, Any]:
    """Both on the same lines, in turn."""
    text = b"".join(line + b"\n" for line in text.split(b"\n")[:LINES] if line)
    framer = settled(text)
    verdicts, messages = learn(text, framer, masks, settings)
    theirs = miner(masks, settings)
    sample = messages[:: max(1, len(messages) // SAMPLE)]
    add_all(theirs, sample)
    copy_of_it = seen_before(text)
    warm_s, cold_s, theirs_s, lines = [], [], [], 0
    laps: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        for spent, fresh in (
            (cold_s, masks.without_memory()),
            (warm_s, warmed(copy_of_it, framer, masks)),
        ):
            seconds, lines = timed(lambda fresh=fresh: answer_all(text, framer, fresh, verdicts))  # type: ignore[misc]
            spent.append(seconds)
        theirs_s.append(timed(lambda: add_all(theirs, sample))[0])
        laps.append(stages(text, framer, warmed(copy_of_it, framer, masks), verdicts))
    ours, other = lines / median(warm_s), len(sample) / median(theirs_s)
    return {
        "lines": lines,
        "drain3_lines_per_s": round(other),
        "lines_per_s": round(ours),
        "ratio": round(ours / other, 1),
        "cold_ratio": round(lines / median(cold_s) / other, 1),
        "us_per_line": {name: round(median(lap[name] for lap in laps) / lines * 1e6, 2) for name in laps[0]},
    }


def seen_before(text: bytes) -> bytes:
    """The same lines with other parameters."""
    with tempfile.TemporaryDirectory(prefix="logweir-bench-") as folder:
        path = Path(folder) / "seen.log"
        path.write_bytes(text)
        return "".join(line + "\n" for line in varied(path, SEEN)).encode()


def warmed(text: bytes, framer: Framer, masks: MaskSet) -> MaskSet:
    """The masks as a process has them that has worked on this."""
    fresh = masks.without_memory()
    for chunk in chunks(text, framer):
        detect.prepare(chunk.records, meta_of(chunk), fresh)
    return fresh


def timed(work: Callable[[], int]) -> tuple[float, int]:
    """Seconds, and what came of it."""
    start = time.perf_counter()
    value = work()
    return time.perf_counter() - start, value


def add_all(theirs: TemplateMiner, messages: list[str]) -> int:
    for message in messages:
        theirs.add_log_message(message)
    return len(messages)


def answer_all(text: bytes, framer: Framer, masks: MaskSet, verdicts: Verdicts) -> int:
    """A template id on every record; physical lines."""
    lines = 0
    for chunk in chunks(text, framer):
        answered = answer(detect.prepare(chunk.records, meta_of(chunk), masks), verdicts)
        if answered["template_id"].has_nulls():
            raise RuntimeError("a record has no template id")
        lines += int(answered["lines"].sum())
    return lines


def answer(prepared: pl.DataFrame, verdicts: Verdicts) -> pl.DataFrame:
    """The records with their template ids, as `ingest` finds them."""
    work = detect.distinct(prepared, VERSION)
    work = detect.answer(work, verdicts.lookup(VERSION, work["key"].to_list()))
    return prepared.join(work.select("key", "template_id"), on="key", how="left", maintain_order="left")


def stages(text: bytes, framer: Framer, masks: MaskSet, verdicts: Verdicts) -> dict[str, float]:
    """Seconds of each stage of a run of its own."""
    spent = dict.fromkeys(("lines and records", "header", "masks", "answer"), 0.0)
    last = time.perf_counter()

    def lap(stage: str) -> None:
        nonlocal last
        now = time.perf_counter()
        spent[stage] += now - last
        last = now

    for chunk in chunks(text, framer):
        lap("lines and records")
        meta = meta_of(chunk)
        parsed = formats.parse(chunk.records, meta.formats, arrived=meta.arrived, zone=meta.zone)
        lap("header")
        prepared = detect.prepare(parsed, meta, masks)
        lap("masks")
        answer(prepared, verdicts)
        lap("answer")
    return spent


def learn(text: bytes, framer: Framer, masks: MaskSet, settings: Settings) -> tuple[Verdicts, list[str]]:
    """The verdict cache of a process that knows every template, and the messages as Drain3 gets them."""
    templates = Templates(
        similarity=settings.drain.similarity,
        depth=DEPTH,
        per_workload=PER_WORKLOAD,
    )
    known: dict[int, Verdict] = {}
    messages: list[str] = []
    for chunk in chunks(text, framer):
        prepared = detect.prepare(chunk.records, meta_of(chunk), masks)
        messages += cleaned(prepared["message"].str.replace_all("\n", " ")).to_list()
        for row in detect.distinct(prepared, VERSION).iter_rows(named=True):
            template, _ = templates.learn(row["masked"], severe=row["severe"], workload="bench")
            template_id = template.template_id if template else UNCLASSIFIED
            known[row["key"]] = Verdict(
                template_id=template_id, score=0.0, anomalous=False, reasons=(), p_value=1.0
            )
    return _Verdicts(known, settings), messages


def settled(text: bytes) -> Framer:
    """What has seen the beginning of the source, so that it knows the format."""
    framer = Framer()
    framer.look(LineCutter().push(text[:BLOCK_BYTES])["raw"], final=True)
    return framer


def chunks(text: bytes, framer: Framer) -> Iterator[Chunk]:
    """As a file source reads them."""
    assembly = Assembly(Cursor(path="bench", identity="bench"))
    assembly.framer = copy(framer)
    for start in range(0, len(text), BLOCK_BYTES):
        yield from assembly.push(text[start : start + BLOCK_BYTES], start)
    yield from assembly.finish(len(text))


def meta_of(chunk: Chunk) -> Meta:
    return Meta(
        batch_id="bench",
        source="bench",
        source_key="0" * 16,
        purpose=Purpose.SCORE,
        arrived=datetime.now(UTC),
        formats=chunk.formats,
        zone="UTC",
    )
