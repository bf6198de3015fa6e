"""The line of a program in an object of whoever collected it."""

import json
from datetime import UTC, datetime

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from pipeline.records.schema import raw_frame
from pipeline.sources.formats import detect, parse
from pipeline.sources.wrappers import unwrap

ARRIVED = datetime(2026, 11, 26, 12, tzinfo=UTC)
POD = {"pod_name": "till-0", "container_name": "till", "host": "node-1"}


def document(line: object = "cash drawer open", **others: object) -> str:
    members = {"@timestamp": "2026-11-26T10:00:00.5Z", "log": line, "stream": "stdout", "kubernetes": POD}
    return json.dumps(members | others, separators=(",", ":"))


ALIKE = document('a \u00e4\t"quoted" \\ line\n')
ODD = (
    document(7),
    document(None),
    document({"log": "inner"}),
    document(level="error"),
    document(kubernetes=POD | {"host": "node-2"}),
    document(stream="stderr"),
    document(**{"@timestamp": 1764151200}),
    document(**{"@timestamp": "no time"}),
    document(message="another text"),
    document(t={"$date": "2026-11-26T09:00:00Z"}),
    document(time="2026-11-26T08:00:00Z"),
    ALIKE.replace('"log"', r'"l\u006fg"'),
    ALIKE.replace('"stream"', '"log":"the last one counts","stream"'),
    ALIKE.replace("quoted", r"\ud83d"),
    ALIKE.replace("quoted", r"\ud83d\ude00"),
    ALIKE.replace("quoted", "tab\t"),
    ALIKE.replace("quoted", r"\q"),
    ALIKE.replace("{", "{ ", 1),
    f" {ALIKE} ",
    ALIKE + ALIKE,
    f"{ALIKE} {ALIKE}",
    ALIKE[:-1],
    ALIKE[: ALIKE.index("pod_name") - 1] + "}",
    ALIKE.replace(",", ",\n", 1),
    document("x" * 2_000),
    '{"log":"no other member"}',
    "cash drawer open",
    "{}",
    "",
)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("timed", [True, False])
def test_an_object_says_the_same_among_others_as_alone(odd: str, timed: bool) -> None:
    for texts in ([ALIKE, odd, ALIKE], [odd, ALIKE, ALIKE], [odd, odd]):
        found = unwrap(pl.Series("raw", texts), "envelope", arrived=ARRIVED, with_times=timed)
        alone = [
            unwrap(pl.Series("raw", [text]), "envelope", arrived=ARRIVED, with_times=timed) for text in texts
        ]
        assert_frame_equal(found, pl.concat(alone))


def test_no_times_are_read_for_a_caller_that_needs_none() -> None:
    texts = pl.Series("raw", [ALIKE, *ODD])
    found, without = (unwrap(texts, "envelope", arrived=ARRIVED, with_times=timed) for timed in (True, False))
    assert without["timestamp"].null_count() == texts.len() > found["timestamp"].null_count()
    assert_frame_equal(found.drop("timestamp"), without.drop("timestamp"))


LINE = "2026-11-28 12:43:53,857 ERROR  [main] shop.Core - stored invoice 7"
FILEBEAT: dict[str, object] = {
    "log": {"file": {"path": "/var/log/app.log"}, "offset": 700}, "host": {"name": "web1"},
    "agent": {"type": "filebeat", "version": "8.1.0"}, "ecs": {"version": "8.0.0"}, "input": {"type": "filestream"},
}  # fmt: skip
AT: dict[str, object] = {"@timestamp": "2026-11-28T11:00:00.250Z"}
SHIPPERS: dict[str, dict[str, object]] = {
    "filebeat": AT | FILEBEAT | {"message": LINE},
    "vector": {"message": LINE, "timestamp": AT["@timestamp"], "host": "web1", "source_type": "file", "file": "/a.log"},
    "vector of docker": {"message": LINE, "timestamp": AT["@timestamp"], "container_id": "1f", "stream": "stdout"},
    "logstash": AT | {"@version": "1", "message": LINE, "path": "/var/log/app.log", "host": "web1"},
    "logstash with ecs": AT | {"message": LINE, "event": {"original": LINE}, "log": {"file": {"path": "/a"}}},
    "fluent bit": {"date": 1795863600.25, "log": LINE + "\n", "stream": "stderr"},
    "cri of fluent bit": {"time": AT["@timestamp"], "stream": "stdout", "logtag": "F", "message": LINE},
    "cloud logging": {"textPayload": LINE, "severity": "DEFAULT", "timestamp": AT["@timestamp"], "insertId": "1"},
    "cloudwatch": {"timestamp": 1795863600250, "message": LINE, "ingestionTime": 1795863601000},
    "journald": {"__REALTIME_TIMESTAMP": "1795863600250000", "PRIORITY": "6", "_COMM": "java", "MESSAGE": LINE},
}  # fmt: skip


@pytest.mark.parametrize("document", SHIPPERS.values(), ids=SHIPPERS)
def test_the_line_of_a_program_is_read_whoever_collected_it(document: dict[str, object]) -> None:
    lines = [json.dumps(document)] * 3
    row = parse(raw_frame(lines), detect(lines), arrived=ARRIVED).row(1, named=True)
    got = row["level"], row["service"], row["message"], row["timestamp"]
    at = datetime(2026, 11, 28, 11, 0, 0, 250_000, tzinfo=UTC)
    assert got == ("error", "shop.Core", "stored invoice 7", at)


@pytest.mark.parametrize(
    ("text", "level", "message"),
    [
        (LINE, "error", "stored invoice 7 order=7"),
        (
            'time=2026-11-28T10:00:00Z level=error msg="no space" disk=sda',
            "error",
            "no space disk=sda order=7",
        ),
        ('{"level":"error","ts":"2026-11-28T10:00:00Z","msg":"no space"}', "error", "no space order=7"),
        ("<11>Nov 28 10:00:00 web app[7]: no space", "error", "no space order=7"),
    ],
)
def test_a_text_with_a_header_of_its_own_is_a_line_in_any_object_without_a_level(
    text: str, level: str | None, message: str
) -> None:
    lines = [json.dumps({"message": text, "order": 7})] * 3
    row = parse(raw_frame(lines), detect(lines), arrived=ARRIVED).row(1, named=True)
    assert (row["level"], row["message"]) == (level, message)
    with_level = [json.dumps({"level": "info", "message": text})] * 3
    row = parse(raw_frame(with_level), detect(with_level), arrived=ARRIVED).row(1, named=True)
    assert (row["level"], row["message"]) == ("info", text)


@pytest.mark.parametrize(
    "text",
    [
        "job at 2026-11-28 12:00:00 had an ERROR in it",
        "2026-11-28 12:00:00 there was an error",
        "2026-11-28 is the last day, at 12:00:00 ERROR begins",
        "ERROR no space",
        "level=error",
        '{"order":7}',
        "",
    ],
)
def test_a_text_without_a_header_stays_the_message_of_its_record(text: str) -> None:
    lines = [json.dumps({"message": text, "order": 7})] * 3
    row = parse(raw_frame(lines), detect(lines), arrived=ARRIVED).row(1, named=True)
    assert (row["level"], row["message"]) == (None, f"{text} order=7")


def test_what_a_user_added_to_a_collected_line_is_in_the_message_and_what_the_collector_added_is_not() -> (
    None
):
    lines = [json.dumps(AT | FILEBEAT | {"message": "disk is full", "fields": {"env": "prod"}})] * 3
    assert detect(lines) == ("envelope",)
    row = parse(raw_frame(lines), detect(lines), arrived=ARRIVED).row(1, named=True)
    assert (row["message"], row["host"]) == ("disk is full fields.env=prod", "web1")
