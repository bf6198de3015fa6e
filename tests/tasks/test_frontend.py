"""Many batches through the front end at once: the same results as each alone, and one that fails hurts no
other."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import detect
from pipeline.messages.app import make_app
from pipeline.producer import Producer
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Claim, Stage
from pipeline.records.pushed import PushedLines
from pipeline.settings import Settings
from pipeline.sources import pushed as module
from pipeline.sources.framing import MAX_RECORD_BYTES
from pipeline.sources.pushed import KnownFormats, framed, framed_alike
from pipeline.tasks import drain, frontend, ingest, store
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform

pytestmark = pytest.mark.long

ISO = "2026-11-20 10:00:00 INFO job {n} took {n} ms"
SYSLOG = "Nov 20 10:00:00 box app[{n}]: job {n} done"
PLAIN = "job {n} went well"
JSON = '{"time":"2026-11-20T10:00:00Z","level":"info","msg":"job {n}"}'
TRACE = "Traceback (most recent call last):"


def batch(*lines: str, n: int = 7) -> PushedLines:
    return PushedLines("\n".join(line.replace("{n}", str(n)) for line in lines))


def told(*lines: str) -> tuple[str, ...]:
    return framed(batch(*lines))[1]


@pytest.mark.parametrize("line", [ISO, SYSLOG, PLAIN, JSON, "INFO job {n} done"])
def test_lines_of_one_format_are_framed_as_a_look_at_them_would(line: str) -> None:
    batches = [batch(*[line] * size, n=size) for size in (1, 3, 20)]
    for one, rows in zip(batches, framed_alike(batches, told(line)), strict=True):
        expected, formats = framed(one)
        assert rows is not None and rows.equals(expected) and formats == told(line)


@pytest.mark.parametrize(
    ("before", "odd"),
    [
        (ISO, TRACE),
        (ISO, "  at x"),
        (ISO, ""),
        (ISO, PLAIN),
        (ISO, SYSLOG),
        (SYSLOG, ISO),
        (PLAIN, ISO),
        (PLAIN, SYSLOG),
        (PLAIN, JSON),
        (PLAIN, "INFO job"),
        (PLAIN, "ERROR: job"),
        (PLAIN, "user=1 action=login"),
        (PLAIN, "[12.345678] usb 1-1"),
        (PLAIN, "Caused by: x"),
        (PLAIN, ""),
        ("INFO job {n}", ISO.replace("2026", "INFO 2026")),
        (JSON, '{"log":"x\\n","stream":"stdout","time":"2026-11-20T10:00:00Z"}'),
        (ISO, ISO + "x" * MAX_RECORD_BYTES),
        (f"2026-11-20T10:00:00.000000000Z stdout F {ISO}", f"2026-11-20T10:00:00.000000000Z stdout P {ISO}"),
    ],
)
def test_a_batch_with_a_line_of_another_kind_is_looked_at(before: str, odd: str) -> None:
    batches = [batch(before), batch(before, odd, before), batch(before)]
    _, rows, _ = framed_alike(batches, told(*[before] * 3))
    assert rows is None


@given(
    st.lists(
        st.lists(st.sampled_from([ISO, SYSLOG, PLAIN, TRACE, "  at x", ""]), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_taken_as_alike_has_a_record_for_each_line(texts: list[list[str]]) -> None:
    batches = [batch(*lines) for lines in texts]
    for formats in (("iso",), ("syslog",), ()):
        for one, rows in zip(batches, framed_alike(batches, formats), strict=True):
            assert rows is None or rows["raw"].to_list() == one.text.split("\n")


def test_rows_of_a_table_are_always_looked_at() -> None:
    formats = told("time,level,message", "2026-11-20T10:00:00Z,info,a", "2026-11-20T10:00:01Z,error,b")
    assert framed_alike([batch("2026-11-20T10:00:02Z,info,c")], formats) == [None]


def test_formats_are_told_again_after_some_batches_and_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownFormats()
    assert known.of("w") is None
    known.tell("w", ("iso",))
    assert [known.of("w") for _ in range(module.TRUSTED_BATCHES)] == [("iso",)] * module.TRUSTED_BATCHES
    assert known.of("w") is None and known.of("other") is None
    known.tell("w", ())
    assert known.of("w") == ()
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    clock[0] += module.TRUSTED_S + 1
    assert known.of("w") is None
    for longer in (2, 4, 8, 8):
        known.tell("w", ())
        clock[0] += longer * module.TRUSTED_S - 1
        assert known.of("w") == (), "told again, formats are trusted for twice as long"
        clock[0] += 2
        assert known.of("w") is None
    known.tell("w", ("iso",))
    clock[0] += module.TRUSTED_S + 1
    assert known.of("w") is None, "other formats are trusted as the first ones are"


@pytest.fixture
def context(settings: Settings) -> Context:
    return Context(make_app(settings), settings)


def sent(context: Context, texts: dict[str, list[str]]) -> None:
    producer = Producer(context.ledger, context.submit, context.settings)
    for name, lines in texts.items():
        producer.send(lines, workload=f"w{len(lines) % 2}", batch_id=name)


def through(context: Context) -> None:
    """All that waits, a group at a time, as workers do it."""
    for stage, task in ((Stage.INGEST, ingest), (Stage.DRAIN, drain), (Stage.STORE, store)):
        for name in [f"b{n}" for n in range(40)]:
            if context.ledger.state(name) == stage.value:
                task.run(context, name)


TEXTS = {
    f"b{n}": [line.replace("{n}", str(n)) for line in lines]
    for n, lines in enumerate(
        [
            [ISO] * 3,
            [ISO, TRACE, "  at x", "ValueError: x"],
            [SYSLOG] * 2,
            [PLAIN],
            [JSON] * 4,
            ["", PLAIN],
            [ISO],
        ]
        * 5
    )
}


def test_groups_store_what_single_batches_store(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    prepare = frontend.prepared_batches

    def counted(context: Context, claims: Any, works: Any) -> Any:
        sizes.append(len(claims))
        return prepare(context, claims, works)

    monkeypatch.setattr(frontend, "prepared_batches", counted)
    sent(context, TEXTS)
    through(context)
    assert max(sizes) >= 30, sizes
    sink = context.sink(Purpose.SCORE)
    for name, lines in TEXTS.items():
        rows = sink.read(name, f"w{len(lines) % 2}")
        assert rows is not None and context.ledger.state(name) == "done"
        assert "\n".join(rows["raw"]) == "\n".join(lines)
        records, formats = framed(batch(*lines))
        assert rows["raw"].to_list() == records["raw"].to_list()
        assert rows["line"].to_list() == records["line"].to_list()
        assert rows["timed"].any() == bool(formats), (name, formats)


def test_one_batch_that_cannot_be_read_does_not_stop_those_beside_it(context: Context) -> None:
    sent(context, TEXTS)
    context.client.set(context.ledger.keys.payload("b3"), b"not arrow")
    for _ in range(context.settings.internal.max_attempts):
        context.client.hset(context.ledger.keys.batch("b3"), "not_before", 0)
        through(context)
    states = {name: context.ledger.state(name) for name in TEXTS}
    assert {name for name, state in states.items() if state != "done"} == {"b3"}
    assert states["b3"] == "dead"


def test_the_store_step_frames_as_the_ingest_step_did(context: Context) -> None:
    """Formats that were told at ingest travel with the work; another process may have told others since."""
    context.formats.tell("w1", ("iso",))
    sent(context, {"b0": [ISO.replace("{n}", "1")]})
    perform(context, Stage.INGEST, "b0", ingest.step)
    assert detect.formats_of(context.ledger.work("b0")) == ("iso",)
    context.formats.tell("w1", ())
    perform(context, Stage.DRAIN, "b0", drain.step)
    claim = context.ledger.claim("b0", Stage.STORE, "me")
    assert isinstance(claim, Claim)
    prepared = frontend.prepared_batches(context, [claim], [context.ledger.work("b0")])
    assert prepared.claims[0].meta.formats == ("iso",) and prepared.records[0]["timed"].to_list() == [True]
