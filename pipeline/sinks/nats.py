"""Results as Opni's services expect them, published to a stream of NATS.

Only records that came over NATS are answered, each once it has a verdict. A message has an id that comes
from its records, so the server drops one that is published again. A Redis that lost its last moments makes
other batches of the same records. So each message names its records in a header. A process reads the newest
headers before it publishes for the first time under a start of Redis (as sinks/forgotten.py does for files).
The server gives subscribers what the stream has stored. Without JetStream a result is published at most once.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl
import redis
from cachetools import LRUCache

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import unpack_template
from pipeline.errors import LogweirError, SinkUnavailable, SourceUnavailable
from pipeline.logs import logger
from pipeline.nats.connection import NatsConnection
from pipeline.nats.payloads import ANOMALY, NORMAL, WRAPPED, Payload, payload_lists
from pipeline.nats.streams import StreamReader, ensure_in, ensure_out, facts_of, publish_all, publish_once
from pipeline.nats.subjects import FLOWS, INFERENCED, TEMPLATES, Flow
from pipeline.observe import counters as metrics
from pipeline.records.batch import digest
from pipeline.records.pushed import JOINED
from pipeline.redis.connection import answering, connect
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.settings.nats import nats_source
from pipeline.sinks.sink import Last, at_once

SOURCE: Final = "nats:"  # begins the column `source` of records that came over NATS
RECORDS: Final = "Logweir-Records"
MODEL: Final = "opnilog"  # `inference_model` of Opni's services for answers of a model
# Redis loses seconds; a worker that stalled may have published minutes after it died.
LOOK_BACK_S: Final = 180.0
KEEP_S: Final = 30 * 86_400
MAX_RECORDS: Final = 2_000_000  # of the newest messages
LIST_BYTES: Final = 256 << 10  # of a PayloadList; the server may allow less
LIST_RECORDS: Final = 1_000
ROOM_BYTES: Final = 64 << 10  # for headers
PUBLISH_S: Final = 30.0
# Opni calls a line anomalous below this confidence (MODEL_THRESHOLD of its inference).
THRESHOLD: Final = 0.7
_JUST_NORMAL: Final = 0.70001  # 0.7 itself is below 0.7 as a float of 32 bits
_JUST_ANOMALOUS: Final = 0.69999
_REMEMBERED: Final = 8 << 20  # characters of masked lines, and as many of the texts of templates
_PLACE: Final = 100  # characters that the place of a text counts
_DOCUMENT: Final = msgspec.json.Decoder(Payload)


class _Joined(msgspec.Struct):
    joined_documents: list[tuple[str, str]] = []


_JOINED: Final = msgspec.json.Decoder(_Joined)
_RUN: Final = re.compile(r"(\d+)(?:-(\d+))?")


class NatsSink:
    """Publishes results; stores nothing that could be read back. One per process."""

    def __init__(self, settings: Settings) -> None:
        source = nats_source(settings.nats.source)
        assert source is not None  # noqa: S101 - the setting names this sink
        self.settings = settings
        self.source = source
        self.keys = Keys(settings.redis.key_prefix)
        self._client: redis.Redis | None = None
        self._connection: NatsConnection | None = None
        self._masks: MaskSet | None = None
        self._masked: LRUCache[int, str] = LRUCache(_REMEMBERED, getsizeof=_size)
        self._templates: LRUCache[int, str] = LRUCache(_REMEMBERED, getsizeof=_size)
        self._run = ""  # the start of Redis that was looked at
        self._place = ""  # of the stream that is read, in the names of records
        # Sorted lines of each subject, published before this start of Redis.
        self._published: dict[str, np.ndarray] = {}

    # ---- the protocol of sinks ------------------------------------------------------------------

    def write(self, batch_id: str, frame: pl.DataFrame, *, last: Last = at_once) -> None:
        """Publishes what came over NATS and has a verdict.

        Raises SinkUnavailable, and the errors of `last`."""
        self.write_all([(batch_id, frame)], last=last)

    def write_all(self, batches: Sequence[tuple[str, pl.DataFrame]], *, last: Last = at_once) -> None:
        """`write` for each batch, with one wait for the server."""
        answers = [rows for _, frame in batches if (rows := _answered(frame)).height]
        if not answers:
            return
        try:
            self._look()
            messages = [message for rows in answers for message in self._messages(rows)]
            last()
            self._publish(messages)
        except SourceUnavailable as exc:
            raise SinkUnavailable(f"results cannot be published: {exc}") from exc

    def read(self, batch_id: str, workload: str) -> pl.DataFrame | None:  # noqa: ARG002
        """None: what is published is gone."""
        return None

    def remove(self, batch_id: str, workload: str, *, last: Last = at_once) -> None:
        """Nothing: what is published stays published."""

    # ---- messages -------------------------------------------------------------------------------

    def _messages(self, rows: pl.DataFrame) -> Iterable[tuple[str, bytes, str, Mapping[str, str]]]:
        """(subject, data, id, headers)"""
        most = min(LIST_BYTES, self._nats.max_payload - ROOM_BYTES)
        for (source,), some in rows.group_by("source", maintain_order=True):
            subject = str(source).removeprefix(SOURCE)
            flow = FLOWS.get(subject)
            if flow is None:
                continue
            for part in self._fresh(subject, some).iter_slices(LIST_RECORDS):
                yield from self._of_part(subject, flow, part, most)

    def _fresh(self, subject: str, rows: pl.DataFrame) -> pl.DataFrame:
        """The records that were not published before this start of Redis."""
        done = self._published.get(subject)
        if done is None or not done.size:
            return rows
        lines = rows["line"].to_numpy()
        places = np.searchsorted(done, lines).clip(0, done.size - 1)
        return rows.filter(pl.Series(done[places] != lines))

    def _of_part(
        self, subject: str, flow: Flow, rows: pl.DataFrame, most: int
    ) -> Iterable[tuple[str, bytes, str, Mapping[str, str]]]:
        texts, changed = self._texts(rows, flow)
        documents = list(self._documents(rows, flow, texts))
        lines = rows["line"].to_list()
        samples = dict(zip(rows["template_id"], documents, strict=True))
        others = list(map(_joined, rows["raw"]))
        if any(others):
            lines = [
                line for line, more in zip(lines, others, strict=True) for line in [line] * (1 + len(more))
            ]
            documents = [one for pair in zip(documents, others, strict=True) for one in _apart(*pair)]
        at = 0
        for some, data in payload_lists(documents, most):
            here = lines[at : at + len(some)]
            at += len(some)
            records = _runs(list(dict.fromkeys(here)))
            more = [one.id for one in some] if len(set(here)) < len(here) else []
            yield (
                flow.out,
                data,
                digest(flow.out, subject, self._place, records, *more, size=16),
                {RECORDS: f"{subject} {records}"},
            )
        if changed:
            described = [
                # The id that Opni's drain service gives to a template that is new or has changed.
                Payload(
                    id=f"0{t}",
                    log=samples[t].log,
                    log_type=samples[t].log_type,
                    template_matched=text,
                    template_cluster_id=t,
                )
                for t, text in changed.items()
            ]
            for some, data in payload_lists(described, most):
                names = "\0".join(f"{one.template_cluster_id} {one.template_matched}" for one in some)
                yield TEMPLATES, data, digest(TEMPLATES, names, size=16), {}

    def _documents(self, rows: pl.DataFrame, flow: Flow, texts: Mapping[int, str]) -> Iterable[Payload]:
        found = [_read(raw) for raw in rows["raw"]]
        masked = self._masked_lines(rows, found) if flow.out == INFERENCED else None
        columns = ("message", "template_id", "score", "anomalous", "pattern_id")
        for stored, row in zip(found, rows.select(columns).iter_rows(), strict=True):
            message, template_id, score, anomalous, pattern_id = row
            document = stored or Payload(log=message)  # another program may have changed the raw text
            document.anomaly_level = ANOMALY if anomalous else NORMAL
            document.opnilog_confidence = confidence(score, anomalous=anomalous)
            document.inference_model = MODEL
            if masked is not None:
                document.masked_log = document.masked_log or masked.get(pattern_id, "")
                document.template_cluster_id = template_id or 0
                document.template_matched = texts.get(template_id, "")
            yield document

    def _masked_lines(self, rows: pl.DataFrame, found: Sequence[Payload | None]) -> Mapping[int, str]:
        """The masked lines of records that came without one. Each is masked once."""
        lacking = [n for n, document in enumerate(found) if document is None or not document.masked_log]
        if not lacking:
            return {}
        some = rows[lacking].select("pattern_id", "message").unique("pattern_id")
        masked = {n: self._masked[n] for n in some["pattern_id"] if n in self._masked}
        unknown = some.filter(~pl.col("pattern_id").is_in(list(masked)))
        if unknown.height:
            if self._masks is None:
                self._masks = MaskSet.load(extra=self.settings.intake.masks)
            lines = self._masks.mask_exactly(unknown["message"])["masked"]
            fresh = dict(zip(unknown["pattern_id"], lines, strict=True))
            masked |= fresh
            self._masked.update(fresh)
        return masked

    def _texts(self, rows: pl.DataFrame, flow: Flow) -> tuple[Mapping[int, str], Mapping[int, str]]:
        """The templates of these records, and those that no message of this process has told yet.

        Behind Opni's drain service its own templates count."""
        if flow.out != INFERENCED:
            return {}, {}
        ids = [n for n in rows["template_id"].drop_nulls().unique().sort() if n > 0]
        if not ids:
            return {}, {}
        with answering():
            blobs: Any = self._redis.hmget(self.keys.templates, [str(n) for n in ids])
        texts: dict[int, str] = {}
        for number, blob in zip(ids, blobs, strict=True):
            with suppress(LogweirError):
                if blob is not None:
                    texts[number] = unpack_template(number, blob).text
        changed = {number: text for number, text in texts.items() if self._templates.get(number) != text}
        return texts, changed

    # ---- the server -----------------------------------------------------------------------------

    @property
    def _redis(self) -> "redis.Redis":
        if self._client is None:
            self._client = connect(self.settings)
        return self._client

    @property
    def _nats(self) -> NatsConnection:
        if self._connection is None:
            self._connection = NatsConnection(self.source, name="logweir store")
        return self._connection

    def _publish(self, messages: Sequence[tuple[str, bytes, str, Mapping[str, str]]]) -> None:
        if not messages:
            return
        nats = self._nats
        if self.source.is_durable:
            known = nats.call(publish_all(nats.jetstream, messages), PUBLISH_S)
        else:
            nats.call(publish_once(nats.client, messages), PUBLISH_S)
            known = 0
        metrics.nats_published(len(messages) - known, known=known)
        for subject, data, _, _ in messages:
            if subject == TEMPLATES:
                self._templates.update(_told(data))

    def _look(self) -> None:
        """Reads which records were published before this start of Redis, once."""
        with answering():
            run = str(self._redis.info("server")["run_id"])
        if run == self._run:
            return
        self._published = {}
        if self.source.is_durable:
            stream = ensure_in(self._nats, self.source)
            self._place = f"{self.source.stream} {stream.id}"
            ensure_out(self._nats, self.source)
            since = self._since(run)
            if since is not None:
                found = self._nats.call(self._records_since(since), PUBLISH_S + 5.0)
                self._published = {
                    subject: np.array(sorted(lines), dtype=np.uint64) for subject, lines in found.items()
                }
            if self._published:
                logger().info("nats.published_before", records=sum(map(len, self._published.values())))
        self._run = run

    def _since(self, run: str) -> datetime | None:
        """From when on to look: the first process that asks under a start of Redis decides for all."""
        last_at = facts_of(self._nats, self.source.out).last_at
        since = "" if last_at is None else (last_at - timedelta(seconds=LOOK_BACK_S)).isoformat()
        with answering():
            standing: Any = self._redis.get(self.keys.nats_since)
            parts = standing.decode().partition(" ") if standing else ("", "", "")
            if parts[0] == run:
                since = parts[2]
            else:
                self._redis.set(self.keys.nats_since, f"{run} {since}", ex=KEEP_S)
        return datetime.fromisoformat(since) if since else None

    async def _records_since(self, since: datetime) -> dict[str, set[int]]:
        nats = self._nats
        reader = StreamReader(nats.client, nats.jetstream, self.source.out)
        await reader.open(since=since.astimezone(UTC), headers_only=True)
        found: dict[str, set[int]] = {}
        count, deadline = 0, time.monotonic() + PUBLISH_S
        try:
            while time.monotonic() < deadline:
                messages = await reader.fetch(1_000, 8 << 20, 0.5)
                for message in messages:
                    subject, _, text = message.headers.get(RECORDS, "").partition(" ")
                    if subject:
                        lines = found.setdefault(subject, set())
                        before = len(lines)
                        lines.update(_lines(text))
                        count += len(lines) - before
                if not messages or not messages[-1].pending:
                    break
                if count > MAX_RECORDS:
                    logger().warning("nats.published_too_many", records=count)
                    break
        finally:
            await reader.close()
        return found


def confidence(score: float | None, *, anomalous: bool) -> float:
    """A score (0..1, high is anomalous) as `opnilog_confidence`: low is anomalous, and the line is so exactly
    below THRESHOLD. A score of 0.5 is the bound of ours."""
    if score is None:
        return _JUST_ANOMALOUS if anomalous else 1.0
    if anomalous:
        return min(2 * THRESHOLD * (1.0 - score), _JUST_ANOMALOUS)
    return max(1.0 - 2 * (1.0 - THRESHOLD) * score, _JUST_NORMAL)


def _answered(frame: pl.DataFrame) -> pl.DataFrame:
    """The records that came over NATS as payloads and have a verdict.

    A dead letter that was retried is none: its text is a message that could not be read."""
    return frame.filter(
        pl.col("source").str.starts_with(SOURCE)
        & pl.col("raw").str.starts_with(WRAPPED)
        & pl.col("anomalous").is_not_null()
    )


def _joined(raw: str | None) -> Sequence[tuple[str, str]]:
    """Id and line of each payload that was joined to the one of a record."""
    if raw is None or f'"{JOINED}":[' not in raw:
        return ()
    try:
        return _JOINED.decode(raw).joined_documents
    except msgspec.DecodeError:
        return ()


def _apart(answer: Payload, others: Sequence[tuple[str, str]]) -> Iterable[Payload]:
    """The answer to a joined record as one to each of its payloads, with the line of that one."""
    if not others:
        return (answer,)
    own = answer.log[: -sum(len(line) + 1 for _, line in others)]
    pairs = [(answer.id, own), *others]
    return (msgspec.structs.replace(answer, id=name, log=line) for name, line in pairs)


def _read(raw: str | None) -> Payload | None:
    try:
        return _DOCUMENT.decode(raw or "")
    except msgspec.DecodeError:
        return None


def _runs(lines: Sequence[int]) -> str:
    """Lines in short: 5-9,12."""
    found: list[list[int]] = []
    for line in lines:
        if found and line == found[-1][1] + 1:
            found[-1][1] = line
        else:
            found.append([line, line])
    return ",".join(str(first) if first == end else f"{first}-{end}" for first, end in found)


def _lines(text: str) -> Iterable[int]:
    for first, end in _RUN.findall(text):
        yield from range(int(first), int(end or first) + 1)


def _size(text: str) -> int:
    return len(text) + _PLACE


def _told(data: bytes) -> Mapping[int, str]:
    from pipeline.nats.payloads import read_payloads

    return {one.template_cluster_id: one.template_matched for one in read_payloads(data)}
