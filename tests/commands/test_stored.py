"""The verbs over stored results: patterns, exports, findings that outlive their lines, status."""

import csv
import io
import json
import os
import re
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import redis
from answers_contract import frame, row
from command_line import Verb, command_line

from pipeline.commands.stored import tables
from pipeline.opensearch.client import opensearch_client
from pipeline.opensearch.documents import indices
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.sinks.compaction import Compactor, Fate
from pipeline.sinks.manifest import ResultTable
from pipeline.sinks.opensearch import OpenSearchSink
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.retention import GRACE_S, Retention
from pipeline.workers.same_store import join

HOUR = timedelta(hours=1)
DAY_S = 86_400


def stored(settings: Settings, *found: tuple[float, int], batch: str = "b", **more: Any) -> ParquetSink:
    """Stores records of (hours before now, template)."""
    now = datetime.now(UTC).replace(microsecond=0)
    rows = [
        dict.fromkeys(RESULT_SCHEMA)
        | {
            "record_id": f"{batch}-{n}", "source": "app.log", "line": n + 1, "lines": 1, "timed": True,
            "timestamp": now - hours * HOUR, "workload": "shop", "message": f"message {template}",
            "raw": f"raw {template}", "template_id": template, "pattern_id": 2**64 - 1, "anomalous": False,
            "reasons": ["rare:1/9", "new-template"], "score": 0.25,
        }
        | more
        for n, (hours, template) in enumerate(found)
    ]  # fmt: skip
    sink = ParquetSink(settings.data.results)
    sink.write(batch, pl.DataFrame(rows, schema=RESULT_SCHEMA))
    return sink


def compacted(sink: ParquetSink, days: float, **keep: float) -> None:
    """Seals what is stored, and lets results expire as they would so many days from now."""
    retention = Retention(keep_s={ResultTable(name): length for name, length in keep.items()})
    Compactor(
        sink, lambda ids: [Fate.FINAL] * len(ids), retention, now=lambda: time.time() + days * DAY_S
    ).round()


def test_units_are_printed_with_their_reasons(logweir: Verb, settings: Settings) -> None:
    for place in range(4):
        calm = [(0.5 + n / 10, 1 + n % 2) for n in range(60)]
        stored(settings, *calm, batch=f"c{place}", host=f"n{place}")
    stored(settings, (0.1, 9), (0.2, 9), batch="bad", host="n2", anomalous=True, pattern_id=9, p_value=0.001)
    said = logweir("units", "--since", "1h").out.splitlines()
    assert said[0].startswith("1. n2  unusual, p <0.0001") and "2 anomalous" in said[0]
    assert any("anomalous pattern (p 0.001)" in line for line in said[1:4])
    assert "beside 24 normal units" in "\n".join(said) and "1 of them unusual" in said
    assert json.loads(logweir("units", "--json", "--limit", "1").out)["ranking"]["units"][0]["unit"] == "n2"
    nothing = logweir("units", "--by", "service").out
    assert nothing.startswith("no line of this span names a service")
    assert logweir("units", "--normal", "1m").code == 2


def test_news_are_listed_with_their_reasons(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "array md0 is degraded " + "and the rebuild waits for a disk " * 20
    news: dict[str, Any] = {"reasons": ["never-said:900 healthy"], "score": 0.54, "anomalous": True}
    stored(settings, (1, 1), message=long, level="info", **news)
    news |= {"reasons": ["never-said:900"], "score": 0.51, "pattern_id": 7}
    stored(settings, (2, 2), (30, 3), batch="c", message="\x1b[31m", **news)
    with command_line(settings, monkeypatch, capsys, "results", columns=80) as results:
        lines = results("--news").out.splitlines()
        assert max(map(len, lines)) <= 80 and "\x1b" not in "".join(lines)
        assert lines[0].startswith("n1 · ") and lines[0].endswith(" · info · 1 line · shop · T1")
        text = " ".join(" ".join(lines).split())
        assert "array md0 is degraded" in text and "waits for …" not in text
        assert "never seen in 900 lines; usually “healthy” n2" in text
        assert "1 calm line never said before" in " ".join(results("--news", "--limit", "1").out.split())
        found = json.loads(results("--news", "--since", "3d", "--json").out)
        assert [(one["template_id"], one["usual"]) for one in found] == [(1, "healthy"), (2, ""), (3, "")]
        assert found[0]["message"] == long and found[0]["why"].endswith("usually “healthy”")
        assert "all calm lines had been said before" in results("--news", "--workload", "other").out
        assert "leave out --level" in results("--news", "--level", "error").err
    compacted(ParquetSink(settings.data.results), 40, lines=30 * DAY_S)
    with command_line(settings, monkeypatch, capsys, columns=400) as verb:
        assert verb("results", "--since", "3d").out.startswith("no line")
        assert "array md0 is degraded" in verb("results", "--news").out


def test_patterns_are_compared_with_the_span_before_or_another_one(logweir: Verb, settings: Settings) -> None:
    stored(settings, (0.5, 1), (0.6, 1), (0.7, 2), (1.5, 1), (1.6, 3), (169.5, 2))
    now = {row["template_id"]: row for row in json.loads(logweir("patterns", "--since", "1h", "--json").out)}
    assert {key: (row["records"], row["before"]) for key, row in now.items()} == {
        1: (2, 1),
        2: (1, 0),
        3: (0, 1),
    }
    assert sum(now[1]["trend"]) == 2 and len(now[1]["trend"]) == 24
    then = json.loads(
        logweir("patterns", "--since", "1h", "--against", "170h", "--json", "--order", "less").out
    )
    assert [(row["template_id"], row["records"], row["before"]) for row in then] == [(2, 1, 1), (1, 2, 0)]
    said = logweir("patterns", "--since", "1h", "--against", "170h")
    assert said.out.rstrip().endswith("2 patterns shown; before: the span of the same length from 170h on")
    rows = logweir("patterns", "--since", "1h").out.splitlines()
    assert rows[2].startswith("2      1") and rows[2].rstrip().endswith("  shop T1 message 1"), rows
    assert logweir("patterns", "--against", "later").code == 2
    assert (
        "--until now is not after --since 0d; give a longer span" in logweir("patterns", "--since", "0d").err
    )
    assert "no lines in this span" in logweir("patterns", "--workload", "nobody").out


def test_findings_are_shown_after_their_lines_have_expired(logweir: Verb, settings: Settings) -> None:
    stored(settings, (2, 1), (3, 1))
    sink = stored(settings, (2, 7), batch="f", anomalous=True, message="disk is on fire")
    compacted(sink, 2, lines=DAY_S)
    assert "disk" not in logweir("results").out
    said = logweir("results", "--anomalous", "--context", "2")
    assert (said.code, "disk is on fire" in said.out, "message 1" in said.out) == (0, True, False)
    counted = json.loads(logweir("patterns", "--json").out)
    assert {row["template_id"]: row["records"] for row in counted} == {1: 2, 7: 1}


def test_status_says_how_much_is_stored_and_for_how_long(logweir: Verb, settings: Settings) -> None:
    assert "results   0 records in 0 files, 0 MiB; kept: " in logweir("status").out
    sink = stored(settings, (2, 1), (3, 1))
    shown = logweir("status").out
    assert (
        "results   2 records in 1 file, 0 MiB; "
        "kept: lines 30 d, findings 395 d, rates_5m 30 d, rates_1h 395 d, usage 395 d\n"
    ) in shown
    compacted(sink, 2, lines=DAY_S)
    told = json.loads(logweir("status", "--json").out)
    assert told["results"]["rows"] == told["results"]["files"] == 0 < told["results"]["bytes"]
    assert told["results_keep"]["lines"] == 30 * DAY_S
    sink.objects.put("v2/manifest.json", b"{")
    said = logweir("status")
    assert (said.code, "restore it from a backup" in said.err) == (1, True)


@pytest.mark.parametrize("kind", ["csv", "parquet", "delta"])
def test_an_export_holds_what_was_asked_for(
    logweir: Verb, settings: Settings, tmp_path: Path, kind: str
) -> None:
    sink = stored(settings, (1, 1), (2, 2), (50, 1))
    stored(settings, (1, 1), batch="hostile", message='=cmd|"x"!A1\n\x1b[2J,end', workload="bank")
    target = tmp_path / f"out.{kind}"
    said = logweir("export", f"--{kind}", str(target), "--since", "1d")
    assert (said.code, said.out.split(" in ")[0]) == (0, "3 lines"), said.err
    if kind == "csv":
        rows: list[dict[str, Any]] = list(
            csv.DictReader(io.StringIO(target.read_bytes().decode(), newline=""))
        )
        assert {row["message"] for row in rows} == {"message 1", "message 2", '\'=cmd|"x"!A1\n\x1b[2J,end'}
        assert rows[0]["reasons"] == "rare:1/9 new-template"
        first = sink.scan().filter(pl.col("record_id") == "b-0").collect()["timestamp"][0]
        assert rows[0]["timestamp"] == f"{first:%Y-%m-%dT%H:%M:%S}.000000Z"
    else:
        frame = pl.read_parquet(target) if kind == "parquet" else pl.read_delta(str(target))
        assert frame.columns == list(RESULT_SCHEMA)
        assert frame["reasons"].to_list()[0] == ["rare:1/9", "new-template"]
        assert frame["pattern_id"].to_list() == [2**64 - 1 if kind == "parquet" else -1] * 3
        rows = frame.to_dicts()
    assert {row["record_id"] for row in rows} == {"b-0", "b-1", "hostile-0"}
    said = logweir("export", f"--{kind}", str(target))
    assert (said.code, f"--{kind} {target} exists" in said.err) == (2, True)
    none = logweir("export", f"--{kind}", str(tmp_path / "none"), "--workload", "nobody", "--json")
    assert json.loads(none.out) == {"format": kind, "path": str(tmp_path / "none"), "lines": 0, "missing": 0}
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".out")) == []


@pytest.mark.parametrize("kind", ["csv", "parquet", "delta"])
def test_an_export_counts_the_lines_of_files_that_are_gone(
    logweir: Verb, settings: Settings, tmp_path: Path, kind: str
) -> None:
    stored(settings, (2, 1), (3, 1), batch="one")
    sink = stored(settings, (4, 1), batch="two")
    sink.files.file(sink.parts()[0]).unlink()
    said = logweir("export", f"--{kind}", str(tmp_path / f"out.{kind}"))
    assert (said.code, "1 line in " in said.out) == (1, True)
    assert "files with 2 stored lines are not in the store any more" in said.err


def test_results_and_patterns_say_that_files_are_gone_only_where_they_looked_for_them(
    logweir: Verb, settings: Settings
) -> None:
    stored(settings, (50, 1), (51, 1), batch="one")
    sink = stored(settings, (4, 1), batch="two")
    sink.files.file(sink.parts()[0]).unlink()
    for verb in ("results", "results --json", "patterns --since 3d", "patterns --since 3d --json"):
        said = logweir(*verb.split())
        assert (said.code, "files with 2 stored lines are not in the store" in said.err) == (1, True), verb
        assert "T1" in said.out or "message 1" in said.out or '"template_id": 1' in said.out, verb
    for verb in ("results --since 1d", "patterns --since 1d"):
        assert (logweir(*verb.split()).code, logweir(*verb.split()).err) == (0, ""), verb


def test_an_export_of_a_file_that_may_not_be_read_does_not_blame_the_target(
    logweir: Verb, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root reads every file, so the words are those of Polars."""
    stored(settings, (2, 1))

    def refused(*_: object) -> int:
        raise OSError("Permission denied (os error 13): /srv/results/v2/part.parquet")

    monkeypatch.setitem(tables.WRITERS, "csv", refused)
    said = logweir("export", "--csv", str(tmp_path / "out.csv"))
    assert said.code != 0
    assert "/srv/results/v2/part.parquet" in said.err and "--csv" not in said.err


def test_an_export_keeps_the_files_that_it_reads_from_compaction(
    logweir: Verb, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(70):
        sink = stored(settings, (2 + n / 100, 1), batch=f"b{n}")
    write = tables.WRITERS["csv"]

    def slowly(rows: pl.LazyFrame, path: Path) -> int:
        compacted(sink, days=10 / DAY_S)
        compacted(sink, days=(GRACE_S + 60) / DAY_S)
        return write(rows, path)

    monkeypatch.setitem(tables.WRITERS, "csv", slowly)
    said = logweir("export", "--csv", str(tmp_path / "out.csv"))
    assert (said.code, said.out.split(" in ")[0]) == (0, "70 lines"), said.err


def test_exports_of_the_same_lines_are_equal(
    logweir: Verb, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(12):
        stored(settings, *((12 - n - k / 1000, 1) for k in range(400)), batch=f"b{n:02}")
    monkeypatch.setattr(tables, "CHUNK", 500)
    for name in ("one.csv", "two.csv"):
        assert logweir("export", "--csv", str(tmp_path / name)).code == 0
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
    assert pl.read_csv(tmp_path / "one.csv")["timestamp"].is_sorted()


@pytest.mark.parametrize("wrapped", [OSError, pl.exceptions.ComputeError, RuntimeError])
def test_a_full_disk_is_no_damage_of_the_results(
    logweir: Verb,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrapped: type[Exception],
) -> None:
    """As Polars and deltalake say it."""
    stored(settings, (1, 1))

    def full(_rows: object, path: Path) -> int:
        path.write_text("half")
        raise wrapped(f"parquet: underlying IO error: {os.strerror(28)} (os error 28)")

    monkeypatch.setitem(tables.WRITERS, "parquet", full)
    said = logweir("export", "--parquet", str(tmp_path / "out"))
    assert said.err == (
        f"logweir: --parquet {tmp_path / 'out'} cannot be written (No space left on device); free space, fix the "
        "rights, or name another place\n"
    )
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_an_export_that_fails_leaves_nothing_and_says_what_to_do(
    logweir: Verb, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(settings, (1, 1))
    said = logweir("export", "--csv", str(tmp_path / "no" / "out.csv"))
    assert said.code != 0
    assert "cannot be written (No such file or directory)" in said.err and "Traceback" not in said.err
    monkeypatch.setitem(sys.modules, "deltalake", None)
    said = logweir("export", "--delta", str(tmp_path / "out"))
    assert (said.code, "pip install '.[delta]' in a clone" in said.err) == (2, True)

    def full(*_: object) -> int:
        (tmp_path / "half").write_text("half")
        raise OSError(28, os.strerror(28))

    monkeypatch.setitem(tables.WRITERS, "csv", full)
    said = logweir("export", "--csv", str(tmp_path / "out.csv"))
    assert "No space left on device" in said.err
    assert not (tmp_path / "out.csv").exists()


def test_both_verbs_ask_opensearch_where_results_are_there_alone(
    redis_url: str, search_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    own = search_settings.replace(
        redis_url=redis_url,
        key_prefix=search_settings.opensearch.prefix,
        data_dir=tmp_path,
        sinks=("opensearch",),
    )
    now = datetime.now(UTC).replace(microsecond=0)
    found = [row(n, timestamp=now - n * HOUR / 60, level="error" if n == 3 else "info") for n in range(1, 6)]
    OpenSearchSink(own).write("b", frame(found))
    opensearch_client(own).indices.refresh(index=indices(own))
    with command_line(own, monkeypatch, capsys, columns=400) as logweir:
        said = logweir("results", "--level", "error", "--context", "1", "--json")
        assert [(one["line"], one["hit"]) for one in json.loads(said.out)] == [
            (2, False),
            (3, True),
            (4, False),
        ]
        counted = json.loads(logweir("patterns", "--since", "1h", "--json").out)
        assert [(one["template_id"], one["records"], one["severe"]) for one in counted] == [(1, 5, 1)]
        assert logweir("results", "files").code == logweir("export", "--csv", str(tmp_path / "x")).code == 2


def test_results_show_trace_span_and_fields_of_a_record_also_in_its_context(
    logweir: Verb, settings: Settings
) -> None:
    raw = '{"date":1.5,"log":"x","code":7,"trace_id":"5b8efff798038103d269b633813fc60c","span_id":"eee19b7ec3c1b174"}'
    stored(settings, (0.2, 1), (0.1, 2), raw=raw)
    for flags in ((), ("--context", "1", "--text", "message 2")):
        found = json.loads(logweir("results", *flags, "--json").out)
        assert len(found) == 2
        for one in found:
            assert (one["trace_id"], one["span_id"]) == (
                "5b8efff798038103d269b633813fc60c",
                "eee19b7ec3c1b174",
            )
            assert one["fields"]["code"] == 7 and "raw" not in one
        assert (
            "trace_id=5b8efff798038103d269b633813fc60c  span_id=eee19b7ec3c1b174"
            in logweir("results", *flags).out
        )


def test_results_of_plain_lines_have_no_fields(logweir: Verb, settings: Settings) -> None:
    stored(settings, (0.1, 1))
    (one,) = json.loads(logweir("results", "--json").out)
    assert (one["trace_id"], one["span_id"], one["fields"]) == (None, None, {})


def test_lines_of_a_broken_clock_do_not_head_the_results_but_are_named(
    logweir: Verb, settings: Settings
) -> None:
    stored(settings, (0.2, 1), (-20, 2), (-72, 3), (-73, 4))
    said = logweir("results")
    assert [name in said.out for name in ("message 1", "message 2", "message 3")] == [True, True, False]
    (until,) = re.findall(r"more than a day ahead of the clock; --until (\S+) shows them", said.err)
    shown = logweir("results", "--until", until, "--limit", "2")
    assert "message 4" in shown.out and "message 3" in shown.out and shown.err == ""
    only = logweir("results", "--text", "message 3")
    assert "no line in" in only.out and f"--until {until} shows them" not in only.out
    assert "more than a day ahead of the clock" in only.err
    assert logweir("results", "--text", "message 1").err == ""


def test_results_that_were_there_and_are_gone_are_not_called_none(
    logweir: Verb, client: "redis.Redis", settings: Settings
) -> None:
    keys = Keys(settings.redis.key_prefix)
    client.sadd(keys.workloads, "shop")
    client.hset(keys.totals("shop"), mapping={"accepted": 9, "stored": 9})
    assert "no results in" in logweir("results").out, "lines of a baseline are no results"
    client.hset(keys.totals("shop"), "normal", 9)
    for verb in ("results", "patterns", "rates"):
        said = logweir(verb)
        assert said.code == 1 and "were there before, and are gone; mount their folder" in said.err, said
    status = logweir("status")
    assert "trouble   the results in " in status.out and "are gone" in status.out
    stored(settings, (0.2, 1))
    assert "message 1" in logweir("results").out and "trouble" not in logweir("status").out


def test_a_store_that_was_replaced_is_named(logweir: Verb, client: "redis.Redis", settings: Settings) -> None:
    join(client, settings)
    stored(settings, (0.2, 1))
    assert "message 1" in logweir("results").out
    settings.data.dir.rename(settings.data.dir.with_name("unmounted"))
    settings.data.dir.mkdir()
    said = logweir("results")
    assert said.code == 2 and "is another one, or empty; mount or restore it" in said.err, said
