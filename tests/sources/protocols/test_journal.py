"""The export format of the systemd journal."""

import json
import struct

import pytest

from bench._fuzz_requests import checked
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.journal import decode_journal, whole_entries
from pipeline.sources.pushed import framed

# As `journalctl -o export` writes it.
ENTRY = (
    "__CURSOR=s=39f5;i=1;b=7c;m=1;t=6;x=9\n__REALTIME_TIMESTAMP=1795608000250000\n__MONOTONIC_TIMESTAMP=5\n"
    "_BOOT_ID=7c\n_TRANSPORT=syslog\nPRIORITY=3\nSYSLOG_FACILITY=10\nSYSLOG_IDENTIFIER=sshd\n_COMM=sshd\n_PID=4711\n"
    "_HOSTNAME=h1\n_SYSTEMD_UNIT=ssh.service\n_SOURCE_REALTIME_TIMESTAMP=1795608000249000\n"
)


def entry(message: str, **fields: str) -> bytes:
    return (ENTRY + f"MESSAGE={message}\n" + "".join(f"{k}={v}\n" for k, v in fields.items()) + "\n").encode()


def data(name: str, value: bytes) -> bytes:
    return name.encode() + b"\n" + struct.pack("<Q", len(value)) + value + b"\n"


def decoded(*entries: bytes, workload: str = "") -> Decoded:
    return checked(decode_journal(b"".join(entries), Hints(workload=workload)))


def test_an_entry_is_a_record_with_the_columns_of_its_fields() -> None:
    found = decoded(entry("session opened=yes"))
    records = found.records
    assert (records.messages, records.texts) == (["session opened=yes"], ["session opened=yes"])
    assert (records.timestamps, records.levels) == ([1795608000_249_000], ["error"])
    assert (records.hosts, records.processes, records.services) == (["h1"], ["4711"], ["sshd"])
    assert records.workloads == ["h1/sshd"]
    assert found.apart == [b"s=39f5;i=1;b=7c;m=1;t=6;x=9\0session opened=yes"]


def test_fields_that_a_program_set_stand_in_the_raw_text() -> None:
    (raw,) = decoded(entry("a", TRACE_ID="5b8e", SYSLOG_PID="1", CODE_LINE="7")).records.texts
    assert json.loads(raw) == {"MESSAGE": "a", "TRACE_ID": "5b8e"}


def test_a_field_of_data_may_hold_newlines_and_blank_lines() -> None:
    first = ENTRY.encode() + data("MESSAGE", b"two\n\nlines") + data("X", b"\n\n") + b"\n"
    records = decoded(first, entry("next")).records
    assert records.messages == ["two\n\nlines", "next"]
    assert json.loads(records.texts[0]) == {"MESSAGE": "two\n\nlines", "X": "\n\n"}


def test_the_last_entry_needs_no_blank_line_and_empty_lines_are_no_entries() -> None:
    assert decoded(b"\n\n\n", entry("a"), b"\n\n", entry("b").rstrip()).records.messages == ["a", "b"]
    assert decoded(b"\n").records.height == 0


def test_a_container_of_docker_names_the_workload_and_not_its_id() -> None:
    records = decoded(entry("a", CONTAINER_NAME="cart", CONTAINER_ID="5f3a")).records
    assert (records.workloads, records.raws) == (["h1/cart"], None)
    assert decoded(entry("a"), workload="shop").records.workloads == ["shop"]


def test_lines_of_a_stack_trace_are_joined_per_process() -> None:
    lines = ("Traceback (most recent call last):", '  File "a.py"', "ValueError: 7", "next")
    joined = framed(decoded(*map(entry, lines)).records)[0]
    assert joined["message"].to_list() == ["\n".join(lines[:3]), "next"]
    parted = [entry(line).replace(b"4711", str(pid).encode()) for pid, line in enumerate(lines)]
    assert framed(decoded(*parted).records)[0].height == 4


def test_an_entry_without_a_message_or_with_odd_values_is_a_record_all_the_same() -> None:
    records = decoded(b"PRIORITY=9\n__REALTIME_TIMESTAMP=soon\nUNIT=a\xff\n\n", b"=\n\n").records
    assert records.messages[0] == '{"MESSAGE":"","UNIT":"a\ufffd"}'
    assert (records.timestamps, records.levels) == (None, None)


@pytest.mark.parametrize(
    "body",
    [b"MESSAGE\n", b"MESSAGE", b"MESSAGE\n\x05\0\0\0\0\0\0\0abc\n", b"MESSAGE\n" + b"\xff" * 8 + b"abc\n", b"M\n\x01\0\0\0\0\0\0\0abc\n\n"],
)  # fmt: skip
def test_a_length_that_does_not_fit_is_undecodable(body: bytes) -> None:
    with pytest.raises(Undecodable, match="entry 1 of the journal has a field 'M"):
        decode_journal(body, Hints())


def test_a_request_is_bounded_in_entries_and_in_fields() -> None:
    with pytest.raises(Undecodable, match="more than 100,000 records"):
        decode_journal(b"A=1\n\n" * 100_001, Hints())
    with pytest.raises(Undecodable, match="more than 10,000 lines"):
        decode_journal(b"A=1\n" * 20_000, Hints())


@pytest.mark.parametrize("most", [1, 2, 100])
def test_a_body_that_arrives_in_parts_is_cut_between_entries(most: int) -> None:
    binary = ENTRY.encode() + data("MESSAGE", b"two\n\nlines=1\n") + data("X", b"\n\n") + b"\n"
    body = b"\n" + entry("a") + binary + entry("b") + b"\n\n" + binary + entry("c")
    whole = decoded(body).records.messages
    for arrived in range(len(body) + 1):
        found: list[str] = []
        rest = body[:arrived]
        while end := whole_entries(rest, most):
            part = decoded(rest[:end]).records.messages
            assert 0 < len(part) <= most
            found += part
            rest = rest[end:]
        assert found == whole[: len(found)]
        # What is left is no whole entry; with the others behind it, it is the rest.
        assert found + decoded(rest + body[arrived:]).records.messages == whole
    assert found == whole


def test_an_unfinished_body_that_is_no_journal_is_refused_when_its_data_cannot_fit() -> None:
    wrong = b"MESSAGE\n" + struct.pack("<Q", 3) + b"abcdef\n\n"
    with pytest.raises(Undecodable, match="MESSAGE"):
        whole_entries(wrong, 10)
    endless = b"MESSAGE\n" + struct.pack("<Q", 1 << 60) + b"abc"
    assert whole_entries(entry("a") + endless, 10) == len(entry("a"))
