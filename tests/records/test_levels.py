"""What the numbers of a level mean beside other keys."""

import pytest

from pipeline.records.levels import SYSLOG_LEVELS
from pipeline.records.written_levels import level_by_number

NEXTCLOUD = ("reqId", "level", "time", "app", "user", "message", "version")
GELF = ("version", "host", "short_message", "timestamp", "level")
WINDOWS = ("Id", "Level", "ProviderName", "Message")
PYTHON = ("asctime", "name", "level", "message", "lineno")
PINO = ("level", "time", "pid", "hostname", "msg")
SERILOG = ("@t", "@mt", "Level")


@pytest.mark.parametrize(
    ("value", "key", "keys", "expected"),
    [
        ("0", "level", NEXTCLOUD, "debug"),
        ("1", "level", NEXTCLOUD, "info"),
        ("4", "level", NEXTCLOUD, "fatal"),
        ("1", "level", GELF, "critical"),
        ("3", "level", GELF, "error"),
        ("3", "PRIORITY", ("MESSAGE", "PRIORITY"), "error"),
        ("2", "Level", WINDOWS, "error"),
        ("3", "Event.System.Level", ("Event.System.EventID", "Event.System.Level"), "warning"),
        ("2", "Level", SERILOG, "info"),
        ("4", "Level", ("Timestamp", "Level", "Message"), "error"),  # properties of .NET
        ("4", "LogLevel", ("Timestamp", "LogLevel", "Message"), "error"),
        ("17", "severityNumber", ("severityNumber", "body.stringValue"), "error"),
        ("9", "SeverityNumber", ("SeverityNumber", "Body"), "info"),
        ("40", "levelno", ("levelno", "message"), "error"),
        ("40", "level", PYTHON, "error"),
        ("50", "level", PYTHON, "critical"),
        ("40", "level", PINO, "warning"),
        ("30", "level", ("level", "msg"), "info"),
        ("60", "level", ("level", "msg"), "fatal"),
        ("30.0", "level", PINO, "info"),
        ("400", "level", ("level", "channel", "message"), "error"),
        ("250", "level", ("level", "message"), "notice"),
        ("900", "level", ("level", "message"), "warning"),
        ("200", "intLevel", ("intLevel", "message"), "error"),
        ("40000", "level_value", ("level_value", "message"), "error"),
        ("500", "severity", ("insertId", "logName", "severity"), "error"),
        ("6", "level", ("level", "message"), "info"),
        ("7", "severity", ("severity", "message"), "debug"),
    ],
)
def test_a_number_means_what_its_program_means_by_it(
    value: str, key: str, keys: tuple[str, ...], expected: str
) -> None:
    assert level_by_number(value, key, keys) == expected


@pytest.mark.parametrize("value", ["0", "1", "2", "3", "4", "5", "8", "-1", "70", "", "x", "1e3", "1.5"])
def test_a_number_that_no_one_can_tell_is_no_level(value: str) -> None:
    assert level_by_number(value, "level", ("level", "message", "time")) is None


def test_the_numbers_of_other_records_tell_syslog() -> None:
    keys = ("level", "message", "time")
    found = [level_by_number(str(n), "level", keys, ("6", "3")) for n in range(8)]
    assert found == list(SYSLOG_LEVELS)
    assert level_by_number("3", "level", keys, ("1", "2")) is None
