"""What is fuzzed: each target reads bytes as somebody hostile could hand them over.

A target raises what it should not raise; errors of ours are answers. It checks what always holds where there is such a
thing: no line lost, no message let through that is not only ids, one masked line per line.
"""

import base64
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

import msgpack
import polars as pl
from kombu.utils import json as kombu_json

from pipeline.batches import Meta
from pipeline.drain import learner
from pipeline.drain.masking import MaskSet
from pipeline.errors import LogweirError
from pipeline.models.bundle import Manifest, weights_header
from pipeline.opensearch import scan, training
from pipeline.records import UTC_US, Purpose, Verdict, pack_frame, raw_frame, unpack_frame
from pipeline.sources import documents as docs
from pipeline.sources import formats
from pipeline.sources.chunks import Cursor
from pipeline.sources.framing import Framer
from pipeline.sources.lines import LineCutter, decode
from pipeline.sources.times import read_times
from pipeline.workers import guard

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
ZONES = ("UTC", "Europe/Berlin", "Pacific/Apia", "America/St_Johns")
TASKS = frozenset(("logweir.ingest", "logweir.sweep"))
MAX_PAYLOAD = 64 << 20
LAYOUT = docs.Layout(
    time="@timestamp", message="message", level="level", workload=("kubernetes.labels.app", "service")
)

LINES = (
    "2026-11-20T10:00:00.123Z INFO app: user 7 logged in from 10.0.0.7 in 12 ms",
    "Nov 20 10:00:00 host-1 sshd[4711]: Failed password for root from 10.0.0.7 port 22 ssh2",
    '{"time":"2026-11-20T10:00:00Z","level":"error","msg":"disk full","nested":{"a":[1,2]}}',
    'level=warn ts=1700000000.5 msg="slow query" took=12.5ms',
    '{"log":"2026-11-20 ERROR boom\\n","stream":"stderr","time":"2026-11-20T10:00:00.1Z"}',
    "2026-11-20T10:00:00.123456789Z stderr P part of a line",
    '10.0.0.7 - bob [20/Nov/2026:10:00:00 +0100] "GET /a?b=1 HTTP/1.1" 500 12 "-" "curl"',
    "E1120 10:00:00.123456   1234 file.go:12] panic: index out of range [5]",
    'Traceback (most recent call last):\n  File "/srv/app.py", line 12, in run\nValueError: 7 is wrong',
    "081109 203615 148 INFO dfs.DataNode: Receiving block blk_-1608999687919862906 src: /10.250.19.102:54106",
    "\x1b[1;31mERROR\x1b[0m caf\u00e9 \U0001f600 /var/log/x.log a@b.example C:\\Temp\\a 0xff 12:30:00",
)  # fmt: skip
TIMES = (
    "2026-11-20T10:00:00Z", "2026-11-20 10:00:00,123 +0100", "1700000000", "1700000000123", "1700000000.5", "1e400",
    "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-02-30T25:61:61", "2011-12-30T10:00:00", "99999999999999999999",
    "2026-11-20T10:00:00.123456789123Z", "-1", "262143-01-01T00:00:00Z", "20261120T100000Z",
)  # fmt: skip
DOCUMENTS = (
    {"@timestamp": "2026-11-20T10:00:00Z", "message": "disk full", "level": "error", "service": "shop"},
    {"@timestamp": 1700000000123, "message": ["a"], "level": None, "kubernetes": {"labels": {"app": ["x", "y"]}}},
    {"@timestamp": {"a": [1.5]}, "message": {"deep": [[[{}]]]}, "kubernetes.labels.app": "\ud800", "service": 7},
    {"message": "x" * 300, "pattern_id": "18446744073709551616", "template_id": -1, "anomalous": "yes"},
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`run` takes what somebody hostile wrote; `seeds` are where the fuzzer begins."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...] = ()  # pieces that a mutation may put in


def _framing(data: bytes) -> None:
    cut, text = data[0] if data else 0, data[1:]
    cutter, framer = LineCutter(cap=4096), Framer(max_record_bytes=4096)
    frames = []
    for rows in (cutter.push(text[:cut]), cutter.push(text[cut:]), cutter.finish()):
        frames.append(framer.feed_frame(rows))
    frames.append(framer.flush_frame())
    records = pl.concat(frames)
    # A byte order mark alone is a line too.
    expected = text.count(b"\n") + (not text.endswith(b"\n") and text != b"")
    if records["lines"].sum() != expected:
        raise AssertionError(f"{expected} lines became {records['lines'].sum()}")
    found = formats.detect(records["raw"].head(200).to_list())
    parsed = formats.parse(records.drop("end"), found, arrived=NOW, zone=ZONES[cut % len(ZONES)])
    if parsed.height != records.height or parsed["message"].null_count() or parsed["timestamp"].null_count():
        raise AssertionError("a record lost its message or its time")


@cache
def _masks() -> MaskSet:
    return MaskSet.load()


def _masking(data: bytes) -> None:
    lines = decode(data).split("\n")[:20]
    masked = _masks().mask(pl.Series([*lines, "\n".join(lines)], dtype=pl.String))["masked"]
    if len(masked) != len(lines) + 1 or any(not m or "\n" in m for m in masked):
        raise AssertionError("a masked line is empty or no line")


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
    frame = unpack_frame(data, max_bytes=MAX_PAYLOAD)
    if frame.estimated_size() > 2 * MAX_PAYLOAD:
        raise AssertionError("a payload takes more memory than is allowed")


def _manifest(data: bytes) -> None:
    manifest = Manifest.from_json(data.decode("utf-8", "replace"))
    Manifest.from_json(manifest.to_json())


def _weights(data: bytes) -> None:
    weights_header(io.BytesIO(data), len(data))


def _times(data: bytes) -> None:
    zone = ZONES[data[0] % len(ZONES)] if data else "UTC"
    texts = decode(data[1:]).split("\n")[:8]
    found = read_times(pl.Series(texts, dtype=pl.String), arrived=NOW, zone=zone)
    if len(found) != len(texts) or found.dtype != UTC_US:
        raise AssertionError("a time got lost")


_decode = scan.typed(training._FIELDS)


def _documents(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    try:
        source = json.loads(text)
    except (ValueError, RecursionError):  # that is no answer of OpenSearch
        return
    if not isinstance(source, dict):
        return
    document = docs.Document(index="logs", id="1", number=docs.number_of("logs", "1"), seq=1, source=source)
    if not docs.workload_of(document, LAYOUT):
        raise AssertionError("a document has no workload")
    message = docs.message_of(source, LAYOUT)
    docs.records_of([document], [message or docs.text_of(source) or ""], LAYOUT, arrived=NOW, zone="UTC")
    answer = '{"hits":{"hits":[{"_index":"i","_id":"1","sort":[1],"_source":' + text + "}]}}"
    page = training._decoded(answer, _decode)
    training._learn(page["_source"].struct.unnest())


def _stored(data: bytes) -> None:
    kind, blob = data[:1], data[1:]
    reader: Callable[[bytes], object] = {
        b"t": lambda b: learner.unpack(1, b),
        b"v": Verdict.unpack,
        b"m": Meta.load,
        b"c": lambda b: Cursor.unpack(b.decode("utf-8", "replace")),
    }.get(kind, lambda b: learner.unpack(1, b))
    made = reader(blob)
    if isinstance(made, Verdict):
        made.pack()


def _message_seeds() -> list[bytes]:
    def made(args: object, **other: object) -> bytes:
        body = base64.b64encode(
            json.dumps([args, {}, dict.fromkeys(("callbacks", "chain"))]).encode()
        ).decode()
        headers = {
            "lang": "py",
            "task": "logweir.ingest",
            "id": "5f3a",
            "retries": 0,
            "timelimit": [None, None],
        }
        return json.dumps(
            {
                "body": body,
                "content-type": "application/json",
                "content-encoding": "utf-8",
                "headers": headers | other,
                "properties": {
                    "correlation_id": "5f3a",
                    "delivery_info": {"exchange": "", "routing_key": "ingest"},
                    "body_encoding": "base64",
                    "delivery_tag": "7c",
                },
            }
        ).encode()

    return [made(["b-1"]), made([]), made(["b"], expires="2026-11-20T10:00:00+00:00"), made(["b"], eta="x")]


def _payload_seeds() -> list[bytes]:
    lists = pl.DataFrame({"words": [["a"], ["bb", "a text of more than twelve"]], "score": [0.5, None]})
    known = raw_frame(["a line of text that is long", "b"]).with_columns(
        pl.lit(NOW).cast(UTC_US).alias("timestamp")
    )
    return [
        pack_frame(raw_frame(["a", "bb"])),
        pack_frame(known),
        pack_frame(lists),
        pack_frame(lists.clear()),
    ]


def _manifest_seeds() -> list[bytes]:
    calibration = {
        "mode": "baseline", "method": "conformal", "median": 1.0, "threshold": 2.0, "held_out": 20, "total": 30, "quantiles": [1.0, 2.0],
    }  # fmt: skip
    numbers = ("lines", "distinct", "fitted", "templates", "held_out_templates", "left_out", "seconds", "epochs", "steps", "loss",
               "held_out_above", "parameters")  # fmt: skip
    return [
        json.dumps(
            {
                "format": 1, "version": "v1", "created": "2026-01-02T03:04:05+00:00", "mode": "baseline", "mask_version": "abc",
                "tokens": ["<IP>"], "config": {"model": {"hidden": 8}}, "calibration": calibration,
                "stats": dict.fromkeys(numbers, 1) | {"hold_out": "2 folds", "device": "cpu"}, "seed": 1, "template_watermark": 2,
                "parent": None, "held_out": [1], "files": {"model.safetensors": {"size": 7, "sha256": "0" * 64}},
            }
        ).encode()
    ]  # fmt: skip


def _weights_seeds() -> list[bytes]:
    header = json.dumps(
        {
            "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "__metadata__": {"format": "pt"},
        }
    ).encode()
    return [len(header).to_bytes(8, "little") + header + bytes(16)]


def _stored_seeds() -> list[bytes]:
    verdict = Verdict(template_id=1, score=0.5, anomalous=True, reasons=("rare:1/2",))
    meta = Meta(
        source="a.log", source_key="ab", purpose=Purpose.SCORE, arrived=NOW, formats=("json",), zone="UTC"
    )
    cursor = Cursor(path="/a", identity="x")
    template = bytes(msgpack.packb([1, "a <NUM>", False, "shop"]))
    return [
        b"t" + template,
        b"v" + verdict.pack(),
        b"m" + meta.dump().encode(),
        b"c" + cursor.pack().encode(),
    ]


TARGETS = {
    target.name: target
    for target in (
        Target(name="message", run=_message, seeds=_message_seeds, words=(b'"__type__"', b'"__value__"', b"callbacks", b"1e999")),
        Target(name="stored", run=_stored, seeds=_stored_seeds, words=(b"\xc1", b"\xdd\xff\xff\xff\xff", b"NaN", b"1e999")),
        Target(name="manifest", run=_manifest, seeds=_manifest_seeds, words=(b"NaN", b"1e999", b"[" * 2000, b"9" * 5000)),
        Target(name="weights", run=_weights, seeds=_weights_seeds, words=(b'"shape"', b"[" * 2000, b"99999999999999999999")),
        Target(name="payload", run=_payload, seeds=_payload_seeds, words=(b"\xff\xff\xff\x7f", b"\xff" * 8, b"\0" * 8)),
        Target(name="documents", run=_documents, seeds=lambda: [json.dumps(d).encode() for d in DOCUMENTS], words=(b"\\ud800", b"[" * 990 + b"]" * 990)),
        Target(name="times", run=_times, seeds=lambda: [b"\0" + t.encode() for t in TIMES], words=(b"+23:59", b"T", b"\n")),
        Target(name="framing", run=_framing, seeds=lambda: [b"\x20" + t.encode() for t in (*LINES, "\n".join(LINES))], words=(b"\n", b"\r\n", b"\xef\xbb\xbf", b"\0")),
        Target(name="masking", run=_masking, seeds=lambda: [t.encode() for t in LINES], words=(b"\n", b"<NUM>", b"((((", b"aaaaaaaaaaaaaaaa", b"\xef\xb7\x90")),
    )
}  # fmt: skip


def attempt(target: Target, data: bytes) -> BaseException | None:
    """What a target raised that it should not; None when it answered or refused with an error of ours."""
    try:
        target.run(data)
    except LogweirError:
        return None
    except (Exception, pl.exceptions.PanicException) as exc:  # noqa: BLE001 - that is what is looked for
        return exc
    return None


def mutations(target: Target, seed: int) -> Iterator[bytes]:
    """Inputs without end, the same for the same seed: seeds, cut, repeated, glued and with bytes changed."""
    import random

    rng = random.Random(seed)
    corpus = target.seeds()
    yield from corpus
    pieces = (*target.words, b"\0", b"\xff", b"0", b"-", b"null", b"{}", b"[]", b'"')
    while True:
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.choice((1, 1, 2, 3, 8))):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(6):
                case 0:
                    data[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    data[at : at + rng.randrange(16)] = b""
                case 2:
                    data[at:at] = rng.choice(pieces)
                case 3:
                    data[at:at] = data[at : at + rng.randrange(64)] * rng.choice((1, 2, 50))
                case 4:
                    data[at : at + 4] = rng.choice(
                        (b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\xff\xff\xff\xff", b"9999")
                    )
                case _:
                    other = rng.choice(corpus)
                    data[at:] = other[rng.randrange(len(other) + 1) :]
        yield bytes(data[: 64 * 1024])
