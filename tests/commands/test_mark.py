"""`logweir mark`: what a PATTERN means, what is refused with which remedy, and what readers and programs are
shown."""

import io
import json
import sys
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pytest
import redis
from command_line import Said, Verb

from pipeline.cli import parser
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import Template, pack_template
from pipeline.drain.verdicts import WARMING_VERSION, Verdicts
from pipeline.ledger.ledger import Ledger
from pipeline.marks.marks import Kind, State, Target
from pipeline.marks.store import Marks
from pipeline.records.batch import Batch, Purpose
from pipeline.records.schema import RESULT_SCHEMA, raw_frame
from pipeline.records.verdict import Verdict, pattern_ids
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink

NOW = datetime(2026, 11, 20, 10, tzinfo=UTC)
LINE = "user 17 logged in from 10.0.0.7"
MASKED = "user <NUM> logged in from <IP>"
ID = pattern_ids([MASKED])[0]


@pytest.fixture
def marks(client: "redis.Redis", settings: Settings) -> Marks:
    return Marks(client, settings)


def store(settings: Settings, *messages: str, template: int = 3, workload: str = "shop") -> None:
    """Records as a sink has stored them."""
    masked = MaskSet.load().mask(pl.Series("message", list(messages), dtype=pl.String))
    rows = [
        dict.fromkeys(RESULT_SCHEMA)
        | {"record_id": f"r{n}", "source": "a.log", "line": n, "lines": 1, "timestamp": NOW, "workload": workload}
        | {"message": message, "raw": message, "pattern_id": masked["pattern_id"][n], "template_id": template}
        for n, message in enumerate(messages)
    ]  # fmt: skip
    sink = ParquetSink(settings.data.results)
    sink.write(f"b{len(sink.parts())}", pl.DataFrame(rows, schema=RESULT_SCHEMA))


def known(client: "redis.Redis", settings: Settings, number: int, text: str) -> None:
    """A template as the learner has stored it."""
    template = Template(template_id=number, text=text, severe=False, workload="shop")
    client.hset(Keys(settings.redis.key_prefix).templates, str(number), pack_template(template))


def one(said: Said) -> dict[str, Any]:
    assert said.code == 0, said.err
    return dict(json.loads(said.out))


def refused(said: Said, *words: str) -> None:
    assert said.code == 2, (said.out, said.err)
    assert "Traceback" not in said.err and len(said.err.strip().splitlines()) == 1
    for word in words:
        assert word in said.err


# ---- what a PATTERN means ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [LINE, MASKED, f"2026-11-20T10:00:00Z INFO {LINE}", f"  {LINE}\n", f'{{"level":"info","msg":"{LINE}"}}'],
)  # fmt: skip
def test_the_text_of_a_line_is_masked_and_its_header_is_taken_off(
    logweir: Verb, settings: Settings, text: str
) -> None:
    store(settings, LINE, LINE)
    found = one(logweir("mark", text, "normal", "--json"))
    assert found["marked"]["pattern_id"] == ID
    assert found["marked"] | {"text": MASKED, "state": "normal", "workload": None} == found["marked"]
    assert found["seen"] == {"records": 2, "complete": True, "template_id": 3}


def test_a_word_that_may_be_a_level_belongs_to_the_text_where_the_stored_lines_say_so(
    logweir: Verb, settings: Settings, marks: Marks
) -> None:
    text = "ERROR: cannot connect"
    nowhere = one(logweir("mark", text, "normal", "--json"))
    assert nowhere["marked"]["text"] == text, "nobody has seen either"
    store(settings, "cannot connect")
    assert one(logweir("mark", text, "normal", "--json"))["marked"]["text"] == "cannot connect"
    store(settings, "ERROR: cannot bind")
    assert one(logweir("mark", "ERROR: cannot bind", "normal", "--json"))["marked"]["text"] == (
        "ERROR: cannot bind"
    )
    assert len(marks.look().marks) == 3


def test_a_stack_trace_is_marked_by_its_text_on_standard_input(
    logweir: Verb, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = "lookup failed\nTraceback (most recent call last):\n  File \"a.py\", line 3, in f\nKeyError: 'x'"
    store(settings, trace)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(trace.encode() + b"\n")))
    found = one(logweir("mark", "-", "anomalous", "--json"))
    assert found["seen"]["records"] == 1
    assert "lookup failed" in found["marked"]["text"] and "\n" not in found["marked"]["text"]


def test_digits_are_a_pattern_id_and_one_that_nobody_has_seen_is_refused(
    logweir: Verb, settings: Settings, client: "redis.Redis", marks: Marks
) -> None:
    store(settings, LINE, LINE, LINE)
    found = one(logweir("mark", str(ID), "normal", "--json"))
    assert (found["marked"]["text"], found["seen"]["records"]) == (MASKED, 3)
    refused(logweir("mark", "12345", "normal"), "12345", "was seen", "results --json")
    refused(logweir("mark", str(2**64), "normal"), "no pattern id")
    known(client, settings, 17, "a <*>")
    refused(logweir("mark", "17", "normal"), "template T17")
    assert len(marks.look().marks) == 1


def test_a_pattern_that_only_the_verdict_cache_knows_is_known(
    logweir: Verb, settings: Settings, client: "redis.Redis"
) -> None:
    known(client, settings, 7, "user <NUM> logged <*> from <IP>")
    verdict = Verdict(template_id=7, score=None, anomalous=None, reasons=("warming",))
    Verdicts(client, settings).learn(WARMING_VERSION, {ID ^ 1: verdict})
    found = one(logweir("mark", str(ID), "anomalous", "--json"))
    assert found["marked"]["text"] == "user <NUM> logged <*> from <IP>"
    assert found["seen"] == {"records": 0, "complete": True, "template_id": 7}


def test_an_id_that_cannot_be_looked_up_is_marked_with_a_remark(
    logweir: Verb, settings: Settings, marks: Marks
) -> None:
    store(settings, LINE)
    (file,) = settings.data.results.rglob("*.parquet")
    file.write_bytes(b"PAR1 is how it begins")
    said = logweir("mark", "12345", "normal")
    assert said.code == 0 and "cannot be read now" in said.err
    assert "nobody knows how many" in said.out
    assert marks.look().marks[0].target == Target.pattern(12345)


def test_a_template_is_named_by_its_number_or_by_its_text(
    logweir: Verb, settings: Settings, client: "redis.Redis", marks: Marks
) -> None:
    store(settings, LINE, "user 4 logged out from 10.0.0.9")
    known(client, settings, 3, "user <NUM> logged <*> from <IP>")
    found = one(logweir("mark", "T3", "normal", "--json"))
    assert found["marked"]["template_id"] == 3 and found["marked"]["pattern_id"] is None
    assert found["seen"]["records"] == 2
    again = one(logweir("mark", "user <NUM> logged  <*> from <IP>", "anomalous", "--json"))
    assert again["replaced"]["state"] == "normal" and again["marked"]["template_id"] == 3
    assert marks.look().marks[0].target == Target(kind=Kind.TEMPLATE, number=3)
    known(client, settings, 4, "user <NUM> logged <*> from <IP>")
    refused(logweir("mark", "user <NUM> logged <*> from <IP>", "normal"), "T3, T4")
    refused(logweir("mark", "nothing <*> reads so", "normal"), "no template reads", "mark -")
    refused(logweir("mark", "T99", "normal"), "T99", "results --json")
    refused(logweir("mark", "t0", "normal"), "T0", "limit")
    refused(logweir("mark", "T-1", "normal"), "T-1")


def test_what_was_found_in_sessions_is_marked_as_normal_and_as_nothing_else(
    logweir: Verb, settings: Settings, marks: Marks
) -> None:
    refused(logweir("mark", "T-5", "normal"), "sessions or rates", "incidents ID")
    store(settings, "T9 is in no normal session: session x", template=-5)
    refused(logweir("mark", "T-5", "anomalous"), "normal")
    refused(logweir("mark", "T-5", "normal", "--workload", "shop"), "--workload")
    said = logweir("mark", "T-5", "normal", "--for", "7d")
    assert (
        said.code == 0 and "T9 is in no normal session" in said.out and "1 stored finding has it" in said.out
    )
    assert marks.normal([-5, -6, 3], "shop") == {-5}
    assert "T-5 is not marked any more" in logweir("mark", "--revoke", "T-5").out
    assert marks.normal([-5, -6, 3], "shop") == frozenset()


def test_any_bytes_are_read_as_in_a_log_file(logweir: Verb, settings: Settings) -> None:
    store(settings, "caf\\xe9 is closed")
    found = one(logweir("mark", b"caf\xe9 is closed".decode("utf-8", "surrogateescape"), "normal", "--json"))
    assert found["seen"]["records"] == 1


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([" \n"], "PATTERN is empty"),
        (["x" * 70_000], "64 KiB"),
    ],
)
def test_a_pattern_that_can_be_no_line_is_refused(logweir: Verb, args: list[str], word: str) -> None:
    refused(logweir("mark", *args, "normal"), word)
    refused(logweir("mark", "--revoke", *args), word)


# ---- what goes with it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([], "needs a PATTERN"),
        (["some text"], "needs a PATTERN"),
        (["some text", "normal", "--for", "soon"], "--for 'soon'"),
        (["some text", "normal", "--for", "0s"], "--for '0s'"),
        (["some text", "normal", "--for", "9999999d"], "--for"),
        (["some text", "normal", "--why", "x" * 600], "shorten"),
        (["some text", "normal", "--workload", "a\nb"], "no workload"),
        (["some text", "--list"], "'some text'"),
        (["--list", "--for", "7d"], "--for"),
        (["--list", "--workload", "a"], "--workload"),
        (["--list", "--revoke", "a"], "--revoke"),
        (["--revoke", "a", "--why", "b"], "--why"),
        (["some text", "normal", "--revoke", "a"], "'some text'"),
    ],
)
def test_what_does_not_go_together_is_refused(logweir: Verb, args: list[str], word: str) -> None:
    refused(logweir("mark", *args), word)


def test_a_mark_is_shown_with_all_that_was_said(logweir: Verb, settings: Settings, ledger: Ledger) -> None:
    ledger.intake.accept(_batch("shop/cart"))
    store(settings, LINE)
    said = logweir(
        "mark", LINE, "normal", "--for", "7d", "--workload", "shop/cart", "--why", "nightly [/]\x1b[2J"
    )
    assert said.code == 0 and said.err == ""
    head, text, why, count, more = said.out.splitlines()
    assert head.startswith(f"marked {ID} normal in shop/cart until ") and ", by " in head
    assert (text, why) == (f"  {MASKED}", "  why: nightly [/] [2J")
    assert count == "  1 stored line has it; it counts from the next batch on"
    assert more == "  `logweir mark T3 normal` marks all lines of its template"
    assert logweir("mark", "--list").out.splitlines() == [head.removeprefix("marked "), text, why]
    assert (
        "instead of normal in shop/cart" in logweir("mark", LINE, "anomalous", "--workload", "shop/cart").out
    )


def test_a_workload_that_nobody_has_seen_is_remarked_upon(logweir: Verb, ledger: Ledger) -> None:
    said = logweir("mark", LINE, "normal", "--workload", "shpo", "--json")
    assert "no line of 'shpo' was seen" in one(said)["remarks"][0]


def test_masks_that_differ_from_the_live_models_are_remarked_upon(
    logweir: Verb, settings: Settings, client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from pipeline.models.registry import Registry
    from pipeline.models.versions import Versions

    monkeypatch.setattr(Registry, "current", lambda *_: SimpleNamespace(version="m1"))
    monkeypatch.setattr(Versions, "manifest", lambda *_: SimpleNamespace(mask_version="another"))
    assert "LOGWEIR_MASKS" in logweir("mark", LINE, "normal").err


# ---- listed and revoked ------------------------------------------------------------------------


@pytest.mark.long
def test_marks_are_listed_and_revoked_by_what_they_were_given_as(
    logweir: Verb, settings: Settings, client: "redis.Redis", marks: Marks
) -> None:
    assert "nothing is marked" in logweir("mark", "--list").out
    known(client, settings, 3, "a <*> b")
    store(settings, LINE)
    for pattern in (LINE, "T3"):
        assert logweir("mark", pattern, "normal").code == 0
    assert logweir("mark", LINE, "anomalous", "--workload", "shop").code == 0
    listed = one(logweir("mark", "--list", "--json"))
    assert [(m["pattern_id"], m["template_id"], m["workload"], m["state"], m["expired"]) for m in listed["marks"]] == [
        (ID, None, None, "normal", False), (None, 3, None, "normal", False), (ID, None, "shop", "anomalous", False),
    ]  # fmt: skip
    gone = one(logweir("mark", "--revoke", LINE, "--workload", "shop", "--json"))["revoked"]
    assert [(m["pattern_id"], m["workload"], m["text"]) for m in gone] == [(ID, "shop", MASKED)]
    refused(logweir("mark", "--revoke", LINE, "--workload", "shop"), "in 'shop'", "mark --list")
    known(client, settings, 3, "a <*> <*>")  # it has gained a wildcard since
    said = logweir("mark", "--revoke", "a <*> b")
    assert said.code == 0 and said.out.startswith(
        "T3 is not marked any more; it was normal in every workload"
    )
    assert logweir("mark", "--revoke", str(ID)).code == 0
    assert marks.look().marks == ()
    refused(logweir("mark", "--revoke", "T3"), "no mark of T3", "mark --list")


def test_a_mark_that_ran_out_is_listed_as_such(logweir: Verb, marks: Marks) -> None:
    from datetime import timedelta

    marks.put(Target.pattern(ID), State.NORMAL, text=MASKED, lasts=timedelta(milliseconds=1))
    while marks.look().holding:  # a millisecond
        pass
    assert logweir("mark", "--list").out.startswith(f"ran out: {ID} normal in every workload until ")
    assert one(logweir("mark", "--list", "--json"))["marks"][0]["expired"] is True


def test_a_mark_of_a_newer_build_is_counted_and_can_be_revoked(
    logweir: Verb, client: "redis.Redis", marks: Marks
) -> None:
    client.hset(marks.keys.marks, f"pattern:{ID}:", b"\x91\x63")
    assert "1 mark cannot be shown" in logweir("mark", "--list").err
    assert "wire version 99" in one(logweir("mark", "--list", "--json"))["unreadable"][0]
    assert one(logweir("mark", "--revoke", str(ID), "--json"))["revoked"] == [
        {"pattern_id": ID, "template_id": None, "workload": None}
    ]


def test_without_a_redis_it_says_so(logweir: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    said = logweir("mark", LINE, "normal")
    assert said.code in (1, 2) and "Redis" in said.err and "Traceback" not in said.err


def test_the_states_of_the_command_line_are_those_of_a_mark() -> None:
    args = parser().parse_args(["mark", "x", "normal"])
    assert {State.NORMAL.value, State.ANOMALOUS.value} == {"normal", "anomalous"}
    assert State(args.state) is State.NORMAL


def _batch(workload: str) -> Batch:
    return Batch(
        batch_id="b", workload=workload, source="a.log", source_key="00112233aabbccdd", purpose=Purpose.SCORE,
        arrived=NOW, formats=(), zone="UTC", records=raw_frame(["x"]),
    )  # fmt: skip


def test_an_id_may_have_blanks_around_it_and_every_number_that_results_show_is_known_for_one(
    logweir: Verb, client: "redis.Redis", settings: Settings, marks: Marks
) -> None:
    known(client, settings, 17, "disk <*> failed")
    assert logweir("mark", " T17\n", "normal").code == 0
    assert [str(mark.target) for mark in marks.look().marks] == ["T17"]
    for sign in ("", "-"):
        said = logweir("mark", f"T{sign}4{'1' * 18}", "normal")
        assert said.code == 2 and f"T{sign}4111" in said.err
    assert logweir("mark", "--revoke", " T17 ").code == 0
    assert marks.look().marks == ()
