"""OpenSearch: a million records in by bulk, the server killed in the middle, and streamed out again for a
training.

Records go in through the sink of the pipeline, written again until they are in, as a worker does. In the
middle of a bulk the server is killed (-9) and started again on its data; afterwards every `_id` is counted.
Then a plain loop of opensearch-py over a point in time and what a training does (pages, filters, sampler)
take turns reading everything, with the same fields and page size. So does a training from documents of other
programs, whose messages it has to parse and mask. OPENSEARCH_URL names a server to use, which
is not killed; BENCH_DOCUMENTS is how many records, a million without it."""

import os
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import psutil

from bench._running import scratch
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import SinkUnavailable
from pipeline.opensearch import scan
from pipeline.opensearch.client import opensearch_client
from pipeline.opensearch.documents import indices
from pipeline.opensearch.training import learn_pages
from pipeline.records.query import Documents, Query
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.settings import Settings
from pipeline.sinks.opensearch import OpenSearchSink
from pipeline.training.documents import DocumentReader
from pipeline.training.sampling import MAX_PATTERNS, Sampler

DOCUMENTS: Final = 1_000_000
BATCH: Final = 5_000
ROUNDS: Final = 3
PORT: Final = 9330
RETRY_S: Final = 0.5
GIVE_UP_S: Final = 300.0  # without an answer, once the server is there again
STARTER_S: Final = 110.0  # the starter gives up after 120 s; a server that ended earlier ended by itself
RESTART_S: Final = (
    1_800.0  # for a server that is slow to recover its documents, as long as it does not end by itself
)
FIELDS: Final = ["message", "level", "workload", "timestamp", "pattern_id", "template_id", "anomalous"]
FIRST: Final = datetime(2026, 11, 18, tzinfo=UTC)
SPAN_US: Final = 3 * 86_400 * 1_000_000  # three daily indices


def measure(data: Path) -> dict[str, Any]:
    documents = int(os.environ.get("BENCH_DOCUMENTS", DOCUMENTS))
    with scratch() as folder, _server(data, folder) as server:
        settings = Settings(opensearch_url=server.url, opensearch_prefix=f"logweir-bench{os.getpid()}")
        client = opensearch_client(settings)
        try:
            written = _write(settings, server, _batches(data, documents))
            client.indices.refresh(index=indices(settings))
            found = pl.concat(
                page["_id"]
                for page in scan.pages(
                    client, indices(settings), query={"match_all": {}}, fields=[], size=scan.MAX_SIZE
                )
            )
            read = _read(client, settings)
        finally:
            client.indices.delete(index=f"{settings.opensearch.prefix}-*")
    return {
        "documents": documents,
        **read,
        **written,
        "lost": documents - found.n_unique(),
        "doubled": found.len() - found.n_unique(),
    }


def _batches(data: Path, documents: int) -> Iterator[tuple[str, pl.DataFrame]]:
    """Lines of a dozen systems in random order, one number in each made new: as varied as a small cluster."""
    texts = [
        line
        for path in sorted((data / "loghub_2k").glob("*/*.log"))
        for line in path.read_text(encoding="utf-8", errors="backslashreplace").splitlines()
        if line.strip()
    ]
    masked = MaskSet.load().mask(pl.Series("message", texts, dtype=pl.String))
    base = pl.DataFrame({"message": texts, "pattern_id": masked["pattern_id"]}).with_columns(
        (pl.col("pattern_id") % 2_000).cast(pl.Int64).alias("template_id"),
        pl.Series("workload", [f"bench/ns{n % 7}/app{n % 20}" for n in range(len(texts))]),
    )
    draw = np.random.default_rng(1)
    for first in range(0, documents, BATCH):
        size = min(BATCH, documents - first)
        line = pl.int_range(first, first + size, dtype=pl.UInt64, eager=True)
        when = pl.Series(FIRST.timestamp() * 1e6 + line.cast(pl.Float64) * (SPAN_US / documents))
        rows = base[draw.integers(0, base.height, size).tolist()].with_columns(
            line.alias("line"),
            ("bench-" + line.cast(pl.String)).alias("record_id"),
            when.cast(pl.Int64).cast(pl.Datetime("us", "UTC")).alias("timestamp"),
            pl.Series("score", draw.random(size)),
        )
        number = pl.col("line").cast(pl.String)
        rows = rows.with_columns(
            pl.col("message").str.replace(r"\d{3,}", number),
            pl.lit("bench.log").alias("source"),
            pl.lit(1).alias("lines"),
            pl.lit("info").alias("level"),
            (pl.col("score") > 0.99).alias("anomalous"),
            pl.lit([], dtype=pl.List(pl.String)).alias("reasons"),
            pl.lit("bench").alias("model_version"),
        ).with_columns(pl.col("message").alias("raw"))
        blank = [pl.lit(None, dtype=t).alias(n) for n, t in RESULT_SCHEMA.items() if n not in rows.columns]
        frame = rows.with_columns(blank).select([pl.col(n).cast(t) for n, t in RESULT_SCHEMA.items()])
        yield f"bench-{first:08x}", frame


@dataclass(slots=True)
class _Server:
    """A node of our own, or one that is only used."""

    url: str
    command: list[str] = field(default_factory=list)
    process: "subprocess.Popen[str] | None" = None

    def start(self) -> None:
        """Returns when it answers. A server that is only slow is started again: it has recovered a part
        meanwhile."""
        latest = time.monotonic() + RESTART_S
        while True:
            began = time.monotonic()
            if said := self._refused():
                if time.monotonic() - began < STARTER_S or time.monotonic() > latest:
                    raise RuntimeError(f"OpenSearch did not start: {said}")
            else:
                return

    def _refused(self) -> str:
        """What the starter said when the server did not start; empty when it answers."""
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            if line.startswith("ready "):
                return ""
            said.append(line)
        self.process.wait()
        return "".join(said) or f"its starter ended with {self.process.returncode}"

    def kill(self) -> None:
        """kill -9 of the Java process; its starter ends by itself."""
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            child.kill()
        self.process.wait(120)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(300)


@contextmanager
def _server(data: Path, folder: Path) -> Iterator[_Server]:
    if url := os.environ.get("OPENSEARCH_URL"):
        yield _Server(url)
        return
    starter = data.parent / "opensearch" / "start"
    own = _Server(
        f"http://127.0.0.1:{PORT}",
        [str(starter), str(folder / "node"), "--port", str(PORT), "--heap", "1g"],
    )
    own.start()
    try:
        yield own
    finally:
        own.stop()


def _write(
    settings: Settings, server: _Server, batches: Iterator[tuple[str, pl.DataFrame]]
) -> dict[str, Any]:
    """Write all batches; after a third of them kill the server inside a bulk and start it again."""
    sink = OpenSearchSink(settings)
    todo = list(batches)
    seconds, documents, retries, outage = 0.0, 0, 0, 0.0
    for n, (batch_id, frame) in enumerate(todo):
        accident = None
        if n == len(todo) // 3 and server.process is not None:
            accident = threading.Thread(target=_accident, args=(server,), name="accident")
            accident.start()
        began = time.monotonic()
        again = _until_stored(sink, batch_id, frame, accident)
        took = time.monotonic() - began
        if accident is not None:
            accident.join()
        if accident is not None or again:
            retries, outage = retries + again, outage + took
        else:
            seconds, documents = seconds + took, documents + frame.height
    return {
        "bulk_docs_per_s": round(documents / seconds),
        "killed": server.process is not None,
        "retries": retries,
        "outage_s": round(outage, 1),
    }


def _accident(server: _Server) -> None:
    time.sleep(random.uniform(0.02, 0.2))
    server.kill()
    server.start()


def _until_stored(
    sink: OpenSearchSink, batch_id: str, frame: pl.DataFrame, accident: threading.Thread | None
) -> int:
    """As a worker does; returns how many tries failed. The deadline begins when the accident is over."""
    failed = 0
    give_up = time.monotonic() + GIVE_UP_S
    while True:
        try:
            sink.write(batch_id, frame)
        except SinkUnavailable:
            failed += 1
            if accident is not None and accident.is_alive():
                give_up = time.monotonic() + GIVE_UP_S
            if time.monotonic() > give_up:
                raise
            time.sleep(RETRY_S)
        else:
            return failed


def _read(client: Any, settings: Settings) -> dict[str, Any]:
    """Both ways of reading, in turns, so that caches and other work of the machine touch both."""
    masks = MaskSet.load()
    bare, pages, streamed, foreign = [], [], [], []
    patterns = 0
    _bare(client, settings)  # nobody reads first what the server has not read before
    for _ in range(ROUNDS):
        bare.append(_bare(client, settings))
        began, count = time.monotonic(), 0
        for page in learn_pages(client, settings, Query(store="opensearch")):
            count += page.height
        pages.append(count / (time.monotonic() - began))
        sampler = Sampler(masks, limit=MAX_PATTERNS)
        began, count = time.monotonic(), 0
        for page in learn_pages(client, settings, Query(store="opensearch")):
            sampler.add(page)
            count += page.height
        sample = sampler.sample()
        streamed.append(count / (time.monotonic() - began))
        patterns = sample.frame.height
        if sample.lines != count:
            raise RuntimeError(f"the sampler counted {sample.lines} of {count} records")
        foreign.append(_documents(client, settings, masks, count))
    rate, plain = statistics.median(streamed), statistics.median(bare)
    return {
        "docs_per_s": round(rate),
        "bare_scan_docs_per_s": round(plain),
        "ratio": round(rate / plain, 3),
        "documents_docs_per_s": round(statistics.median(foreign)),
        "documents_ratio": round(statistics.median(foreign) / plain, 3),
        "pages_docs_per_s": round(statistics.median(pages)),
        "patterns": patterns,
        "rounds": ROUNDS,
        "page_size": scan.MAX_SIZE,
        "rates": {
            "streamed": [round(r) for r in streamed],
            "documents": [round(r) for r in foreign],
            "bare": [round(r) for r in bare],
        },
    }


def _documents(client: Any, settings: Settings, masks: MaskSet, expected: int) -> float:
    """As `logweir train --opensearch` reads documents of other programs: nothing of them is known before, so
    headers are parsed and each message is masked."""
    documents = Documents(
        index=indices(settings), fields=("timestamp", "message", "level"), workload_fields=("workload",)
    )
    sampler = Sampler(masks.without_memory(), limit=MAX_PATTERNS)
    began = time.monotonic()
    for page in DocumentReader(client, Query(store="opensearch", documents=documents)).pages():
        sampler.add(page)
    sample = sampler.sample()
    took = time.monotonic() - began
    if sample.lines != expected:
        raise RuntimeError(f"the sampler counted {sample.lines} of {expected} documents")
    return expected / took


def _bare(client: Any, settings: Settings) -> float:
    """The loop that everybody writes."""
    index = indices(settings)
    began, count, after = time.monotonic(), 0, None
    pit = client.create_pit(index=index, params={"keep_alive": "2m"})["pit_id"]
    while True:
        body = {
            "size": scan.MAX_SIZE,
            "query": {"match_all": {}},
            "pit": {"id": pit, "keep_alive": "2m"},
            "sort": [{"_seq_no": "asc"}],
            "_source": FIELDS,
            "track_total_hits": False,
            **({"search_after": after} if after else {}),
        }
        hits = client.search(body=body)["hits"]["hits"]
        if not hits:
            break
        count += len(hits)
        after = hits[-1]["sort"]
    client.delete_pit(body={"pit_id": [pit]})
    return float(count / (time.monotonic() - began))
