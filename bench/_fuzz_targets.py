"""What is fuzzed: each target reads bytes as somebody hostile could hand them over.

A target raises what it should not raise; errors of ours are answers. It checks what always holds where there
is such a thing: no line lost, no message let through that is not only ids, one masked line per line. What
works on columns costs the same for one input as for hundreds, so such a target takes many independent ones
together and checks each."""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

import polars as pl
from kombu.utils import json as kombu_json

from bench import _fuzz_requests as requests
from bench import _fuzz_seeds as seeds
from bench._fuzz_seeds import NOW
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import unpack_template
from pipeline.errors import LogweirError
from pipeline.messages import filter as guard
from pipeline.models.bundle import Manifest
from pipeline.opensearch import scan, training
from pipeline.records.delivery import Meta
from pipeline.records.levels import LEVELS
from pipeline.records.payload import unpack
from pipeline.records.schema import UTC_US
from pipeline.records.verdict import Verdict
from pipeline.sources import documents as docs
from pipeline.sources import formats
from pipeline.sources.chunks import Cursor
from pipeline.sources.framing import Framer
from pipeline.sources.lines import LineCutter, decode
from pipeline.sources.pushed import framed
from pipeline.sources.times import read_times

ZONES = ("UTC", "Europe/Berlin", "Pacific/Apia", "America/St_Johns")
TASKS = frozenset(("logweir.ingest", "logweir.sweep"))
MAX_PAYLOAD = 64 << 20
CAP = 4096  # bytes of a record: small, so that the cap is often met
BY_ITSELF = 512  # one input in so many is also framed alone, its formats detected from it alone
PAGE = 32  # documents: one that is odd changes how its whole page is read
LAYOUT = docs.Layout(
    time="@timestamp", message="message", level="level", workload=("kubernetes.labels.app", "service")
)
# What a Framer may have been told or have found out; none is detected from the stream.
FORMATS = (None, ("docker", "cri", "json", "klog"), ("syslog", "log4j", "iso", "level"), (), formats.NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`run` takes what somebody hostile wrote, up to `together` inputs at once; `seeds` are where the fuzzer
    begins."""

    name: str
    run: Callable[[Sequence[bytes]], None]
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...] = ()  # pieces that a mutation may put in
    made: Callable[[Random], bytes] | None = None  # an input that is no mutation
    together: int = 1


def _alone(read: Callable[[bytes], None]) -> Callable[[Sequence[bytes]], None]:
    def run(inputs: Sequence[bytes]) -> None:
        for data in inputs:
            read(data)

    return run


def _first(data: bytes) -> int:
    return data[0] if data else 0


def _framing(inputs: Sequence[bytes]) -> None:
    """Each input has a LineCutter of its own; what they cut is one stream, as of files that are read one
    after another.

    Formats and zone are those of the first input, so neither half may do what the whole did; then the whole
    is kept."""
    rows = [_cut(data) for data in inputs]
    found = _framed(
        [frame for frames in rows for frame in frames], inputs, FORMATS[zlib.crc32(inputs[0]) % len(FORMATS)]
    )
    _parsed(found, formats.NAMES, ZONES[_first(inputs[0]) % len(ZONES)])
    for mine, data in zip(rows, inputs, strict=True):
        if len(inputs) == 1 or zlib.crc32(data) % BY_ITSELF == 0:
            found = _framed(mine, [data], None)
            names = formats.detect(found["raw"].head(200).to_list())
            _parsed(found, names, ZONES[_first(data) % len(ZONES)])


def _cut(data: bytes) -> list[pl.DataFrame]:
    """Rows of an input that arrives in two blocks."""
    cutter, cut, text = LineCutter(cap=CAP), _first(data), data[1:]
    rows = [cutter.push(block) for block in (text[:cut], text[cut:]) if block]
    if cutter.pending or not rows:
        rows.append(cutter.finish())
    return rows


def _framed(
    rows: Sequence[pl.DataFrame], inputs: Sequence[bytes], given: tuple[str, ...] | None
) -> pl.DataFrame:
    """Records of all inputs, in some feeds; raises when one of them has not exactly its lines."""
    framer = Framer(max_record_bytes=CAP, formats=given)
    stream = pl.concat(rows)
    third = stream.height // 3
    feeds = (stream[:third], stream[third : 2 * third], stream[2 * third :]) if third else (stream,)
    records = pl.concat([*(framer.feed_frame(feed) for feed in feeds), framer.flush_frame()])
    lines = records["lines"]
    if (records["raw"].str.count_matches("\n", literal=True) != lines.clip(1) - 1).any():
        raise AssertionError("a record has not as many lines as it says")
    # What continues a long line has no line of its own.
    texts = zip(lines.to_list(), records["raw"].to_list(), strict=True)
    seen = "".join("\n" + raw if count else raw for count, raw in texts).split("\n")[1:]
    at = 0
    for data in inputs:
        written = _lines(data[1:])
        if seen[at : at + len(written)] != written:
            raise AssertionError(f"{len(written)} lines are not what was written")
        at += len(written)
    if at != len(seen):
        raise AssertionError(f"{at} lines became {len(seen)}")
    return records.drop("end")


def _lines(text: bytes) -> list[str]:
    """The lines of a text, the simple way. A byte order mark alone is a line too."""
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    written = [decode(line).removesuffix("\r") for line in lines]
    if written:
        written[0] = written[0].removeprefix("\ufeff")
    return written


def _parsed(records: pl.DataFrame, names: tuple[str, ...], zone: str) -> None:
    parsed = formats.parse(records, names, arrived=NOW, zone=zone)
    if not parsed.select("raw", "line", "lines").equals(records.select("raw", "line", "lines")):
        raise AssertionError("a record is not what was framed")
    if parsed["message"].null_count() or parsed["timestamp"].null_count():
        raise AssertionError("a record lost its message or its time")
    if not parsed["level"].drop_nulls().is_in(list(LEVELS)).all():
        raise AssertionError("a level is none of ours")
    _in_range(parsed["timestamp"])


def _in_range(times: pl.Series) -> None:
    if not times.drop_nulls().dt.year().is_between(1970, 2260).all():
        raise AssertionError("a time is out of range")


@cache
def _masks() -> MaskSet:
    return MaskSet.load()


def _masking(inputs: Sequence[bytes]) -> None:
    messages: list[str] = []
    for data in inputs:
        lines = decode(data).split("\n")[:20]
        messages += lines
        messages.append("\n".join(lines))
    masked = _masks().mask(pl.Series(messages, dtype=pl.String))["masked"]
    if len(masked) != len(messages) or any(not m or "\n" in m for m in masked):
        raise AssertionError("a masked line is empty or no line")
    # Of several lines joined by <NL> a mask may see across it; nothing masks them again.
    kinds = pl.Series([m for m, text in zip(masked, messages, strict=True) if "\n" not in text]).unique()
    if not _masks().mask(kinds)["masked"].equals(kinds):
        raise AssertionError("masking a masked line changes it")


def _message(data: bytes) -> None:
    _, value = guard.bounded((b"ingest", data))
    try:
        # What kombu does; guard drops what this raises.
        raw = kombu_json.loads(value.decode("utf-8"))
    except (ValueError, TypeError, RecursionError, ArithmeticError, AttributeError, LookupError):
        return
    if guard.fault(raw) or guard.unwanted(raw, TASKS):
        return
    made = guard.wake_up(raw, "ingest")
    args, kwargs, embed = json.loads(made["body"])
    if not guard.is_message(made) or kwargs or any(embed.values()) or not all(a.isprintable() for a in args):
        raise AssertionError("a message was let through that is not only ids")
    json.dumps(made).encode()


def _payload(data: bytes) -> None:
    frame, _ = framed(unpack(data, max_bytes=MAX_PAYLOAD))
    if frame.estimated_size() > 2 * MAX_PAYLOAD:
        raise AssertionError("a payload takes more memory than is allowed")


def _manifest(data: bytes) -> None:
    manifest = Manifest.from_json(data.decode("utf-8", "replace"))
    Manifest.from_json(manifest.to_json())


def _times(inputs: Sequence[bytes]) -> None:
    texts: dict[str, list[str]] = {}
    for data in inputs:
        texts.setdefault(ZONES[_first(data) % len(ZONES)], []).extend(decode(data[1:]).split("\n")[:8])
    for zone, column in texts.items():
        found = read_times(pl.Series(column, dtype=pl.String), arrived=NOW, zone=zone)
        if len(found) != len(column) or found.dtype != UTC_US:
            raise AssertionError("a time got lost")
        _in_range(found)


_decode = scan.typed(training._FIELDS)


def _documents(inputs: Sequence[bytes]) -> None:
    texts: dict[str, str] = {}
    sources: dict[str, dict[str, object]] = {}
    for number, data in enumerate(inputs):
        text = data.decode("utf-8", "replace")
        try:
            source = json.loads(text)
        except (ValueError, RecursionError):  # that is no answer of OpenSearch
            continue
        if isinstance(source, dict):
            texts[str(number)], sources[str(number)] = text, source
    if sources:
        _taken(sources)
    # Lists and objects are read another way, and with them all that stands on the same page.
    plain = {
        i for i, source in sources.items() if not any(isinstance(source.get(f), dict | list) for f in training._FIELDS)
    }  # fmt: skip
    for ids in (sorted(plain), sorted(sources.keys() - plain)):
        for start in range(0, len(ids), PAGE):
            _learned({i: texts[i] for i in ids[start : start + PAGE]})


def _taken(sources: dict[str, dict[str, object]]) -> None:
    """As records to score."""
    documents = [
        docs.SourceDocument(index="logs", id=i, number=docs.document_number("logs", i), seq=1, source=source)
        for i, source in sources.items()
    ]
    if not all(docs.document_workload(document, LAYOUT) for document in documents):
        raise AssertionError("a document has no workload")
    messages = [docs.message_of(d.source, LAYOUT) or docs.text_of(d.source) or "" for d in documents]
    records = docs.document_records(documents, messages, LAYOUT, arrived=NOW, zone="UTC")
    whole = records.group_by("line").agg(pl.col("raw").str.join(""), pl.col("lines").sum())
    seen = {number: (raw, lines) for number, raw, lines in whole.iter_rows()}
    for document, message in zip(documents, messages, strict=True):
        text = message.rstrip()
        if seen.get(document.number) != (text, text.count("\n") + 1):
            raise AssertionError("a document lost some of its message")


def _learned(texts: dict[str, str]) -> None:
    """As records to learn from: one page of an answer."""
    hits = ",".join(
        f'{{"_index":"i","_id":"{i}","sort":[{i}],"_source":{text}}}' for i, text in texts.items()
    )
    page = training._decoded('{"hits":{"hits":[' + hits + "]}}", _decode)
    learned = training._learn(page["_source"].struct.unnest())
    if page["_id"].to_list() != list(texts) or learned.height != len(texts):
        raise AssertionError("a document got lost")


def _stored(data: bytes) -> None:
    kind, blob = data[:1], data[1:]
    reader: Callable[[bytes], object] = {
        b"t": lambda b: unpack_template(1, b),
        b"v": Verdict.unpack,
        b"m": Meta.load,
        b"c": lambda b: Cursor.unpack(b.decode("utf-8", "replace")),
    }.get(kind, lambda b: unpack_template(1, b))
    made = reader(blob)
    if isinstance(made, Verdict):
        made.pack()


TARGETS = {
    target.name: target
    for target in (
        Target(name="message", run=_alone(_message), seeds=seeds.messages, words=(b'"__type__"', b'"__value__"', b"callbacks", b"1e999")),
        Target(name="stored", run=_alone(_stored), seeds=seeds.stored, words=(b"\xc1", b"\xdd\xff\xff\xff\xff", b"NaN", b"1e999")),
        Target(name="manifest", run=_alone(_manifest), seeds=seeds.manifests, words=(b"NaN", b"1e999", b"[" * 2000, b"9" * 5000)),
        Target(name="request", run=_alone(requests.run), seeds=requests.seeds, words=seeds.REQUEST_WORDS),
        Target(name="payload", run=_alone(_payload), seeds=seeds.payloads, words=(b"\xff\xff\xff\x7f", b"\xff" * 8, b"\0" * 8)),
        Target(name="documents", run=_documents, seeds=seeds.documents, words=seeds.JSON_WORDS, made=seeds.document, together=256),
        Target(name="times", run=_times, seeds=seeds.times, words=seeds.TEXT_WORDS, together=1024),
        Target(name="framing", run=_framing, seeds=seeds.framing, words=seeds.TEXT_WORDS, together=1024),
        Target(name="masking", run=_masking, seeds=seeds.lines, words=seeds.TEXT_WORDS, together=1024),
    )
}  # fmt: skip


def attempt(target: Target, inputs: Sequence[bytes]) -> BaseException | None:
    """What a target raised that it should not; None when it answered or refused with an error of ours.

    Of several inputs together a refusal is returned too: it hides what the others would have done.
    """
    try:
        target.run(inputs)
    except LogweirError as exc:
        return exc if len(inputs) > 1 else None
    except (Exception, pl.exceptions.PanicException) as exc:  # noqa: BLE001 - that is what is looked for
        return exc
    return None
