"""Masking: the shipped masks, their examples, the rules a masks file has to keep, and its properties."""

import csv
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_sets import needs_log_sets

from pipeline.drain.masking import multiline as digest
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.masking.multiline import EMPTY, LINE_END
from pipeline.errors import BadMask
from pipeline.records.verdict import pattern_ids

LOGHUB = Path(__file__).parents[3] / "shared" / "data" / "loghub_2k"
MASKS = MaskSet.load()
BY_NAME = {mask.name: mask for mask in MASKS.masks}

JAVA = """java.lang.IllegalStateException: order 4711 is gone
\tat com.shop.Order.load(Order.java:42)
\tat com.shop.Order.<init>(Order.java:17)
Caused by: java.io.IOException: disk /dev/sda1 is full
\tat sun.nio.ch.Net.bind(Native Method)
\t... 12 more"""
PYTHON = """Traceback (most recent call last):
  File "/srv/app/main.py", line 12, in run
    do(thing)
    ~~^^^^^^^
  File "/srv/app/main.py", line 99, in do
    raise ValueError(thing)
ValueError: thing 7 is wrong"""
GO = """panic: index out of range [5]
goroutine 1 [running]:
main.run(0xc000012345, 0x2)
\t/src/app/main.go:12 +0x1d
main.main()
\t/src/app/main.go:5 +0x20"""
NODE = """TypeError: x is not a function
    at Object.<anonymous> (/srv/app.js:3:5)
    at node:internal/main/run_main_module:23:47"""
RUST = """thread 'main' panicked at src/main.rs:4:5: boom
stack backtrace:
   0: rust_begin_unwind::panic
             at ./src/lib.rs:3:5"""

# Pieces that masks care about, glued in all ways; and any text at all.
PIECES = st.sampled_from(
    [
        "a",
        "b",
        "1",
        "12",
        "200",
        "-7",
        "3.5",
        "1,024",
        "/var/log/x",
        "/home",
        "C:\\Temp\\a",
        "10.0.0.1",
        "10.0.0.1:80",
        "::1",
        "fe80::1",
        "HTTP/1.1",
        "status=500",
        "exit_code",
        "user=root",
        "rhost=",
        "for",
        "user",
        "bob",
        "from",
        "[preauth]",
        "blk_-123",
        "job_1_2",
        "0xff",
        "deadbeef",
        "83bc2a",
        "x86_64",
        "log4j",
        "utf-8",
        "SHA256",
        "jk2_init",
        "10ms",
        "4G",
        "12:30:00",
        "2026-11-20",
        "Nov",
        "20",
        "http://h:1/p",
        "a@b.example",
        "pod-7f9c5d-x2x8k",
        "<NUM>",
        "<IP>",
        "<PATH>",
        "<VALUE>",
        "<NL>",
        "<",
        ">",
        "=",
        ":",
        "/",
        ".",
        "-",
        "_",
        ",",
        ";",
        '"',
        "'",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "@",
        "\\",
        "+",
        "~",
        "%",
        "#",
        "$",
        "é",
        "😀",
    ]
)
GLUED = st.lists(st.one_of(PIECES, st.just(" "), st.text(max_size=3)), max_size=14).map("".join)
SPACED = st.lists(PIECES, max_size=14).map(" ".join)
MESSAGES = st.one_of(GLUED, SPACED, st.text(max_size=60))
BATCHES = st.lists(MESSAGES, max_size=12)


def masked(messages: list[str]) -> list[str]:
    return MASKS.mask(pl.Series(messages, dtype=pl.String))["masked"].to_list()


def masks_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_shipped_mask_matches_its_example_and_gives_what_it_expects(name: str) -> None:
    mask = BY_NAME[name]
    assert pl.Series([mask.example]).str.contains(mask.pattern).all()
    assert mask.expect is not None
    active = [replace(m, enabled=True) for m in MASKS.masks if m.enabled or m is mask]
    assert MaskSet.of(active, expect={name}).mask_one(mask.example) == mask.expect


@given(BATCHES)
@settings(max_examples=150, deadline=None)
def test_masking_a_masked_line_changes_nothing(messages: list[str]) -> None:
    once = masked([message.replace("\n", " ") for message in messages])
    assert masked(once) == once


@given(BATCHES)
@settings(max_examples=40, deadline=None)
def test_a_batch_gives_what_its_messages_give_one_by_one_in_their_order(messages: list[str]) -> None:
    frame = MASKS.mask(pl.Series(messages, dtype=pl.String))
    assert frame.schema == {"masked": pl.String, "pattern_id": pl.UInt64}
    assert frame["masked"].to_list() == [MASKS.mask_one(message) for message in messages]
    assert frame["pattern_id"].to_list() == pattern_ids(frame["masked"].to_list())


@given(st.lists(SPACED.filter(lambda line: line.strip()), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_no_mask_crosses_a_line(lines: list[str]) -> None:
    # The word in front makes sure that none of the lines is a stack frame.
    lines = ["then " + line for line in lines]
    assert MASKS.mask_one("\n".join(lines)) == f" {LINE_END} ".join(masked(lines))


@given(MESSAGES)
@settings(max_examples=150, deadline=None)
def test_a_masked_line_is_one_trimmed_line_that_is_never_empty(message: str) -> None:
    line = MASKS.mask_one(message)
    assert line == " ".join(line.split())
    assert line


def test_a_batch_spread_over_threads_gives_what_small_batches_give() -> None:
    messages = [
        f"served block blk_{n} to 10.0.{n % 256}.7 in {n}ms, status={200 + n % 3}" for n in range(9000)
    ]
    small = [line for start in range(0, 9000, 1000) for line in masked(messages[start : start + 1000])]
    assert masked(messages) == small
    assert len(set(small)) == 3


def test_no_messages_give_an_empty_frame_of_the_right_types() -> None:
    frame = MASKS.mask(pl.Series([], dtype=pl.String))
    assert frame.schema == {"masked": pl.String, "pattern_id": pl.UInt64}
    assert frame.height == 0


@pytest.mark.parametrize("message", ["", "  \t ", "\n\n", "\x00", "\x1b[0m", None])
def test_a_message_without_text_is_masked_as_empty(message: str | None) -> None:
    assert MASKS.mask(pl.Series([message], dtype=pl.String))["masked"].to_list() == [EMPTY]


def test_terminal_colours_and_runs_of_blanks_do_not_make_new_lines() -> None:
    assert masked(["\x1b[1;31mERROR\x1b[0m \t disk  full\r", "ERROR disk full"]) == ["ERROR disk full"] * 2


@pytest.mark.parametrize(
    ("trace", "digest"),
    [
        (
            JAVA,
            "java.lang.IllegalStateException: order <NUM> is gone <NL> Caused by: java.io.IOException: disk "
            "<PATH> is full",
        ),
        (PYTHON, "Traceback (most recent call last): <NL> ValueError: thing <NUM> is wrong"),
        (GO, "panic: index out of range [<NUM>] <NL> goroutine <NUM> [running]:"),
        (NODE, "TypeError: x is not a function"),
        (RUST, "thread 'main' panicked at src/main.rs:<NUM>:<NUM>: boom <NL> stack backtrace:"),
    ],
    ids=["java", "python", "go", "node", "rust"],
)
def test_stack_frames_leave_the_masked_line(trace: str, digest: str) -> None:
    assert MASKS.mask_one(trace) == digest


def test_prose_that_begins_like_a_frame_stays() -> None:
    assert (
        MASKS.mask_one("disk full\nat least two volumes are affected")
        == "disk full <NL> at least two volumes are affected"
    )


def test_at_most_eight_following_lines_are_kept() -> None:
    line = MASKS.mask_one("\n".join("abcdefghijklmn"))
    assert line.split(f" {LINE_END} ") == list("abcdefghi")


@pytest.mark.parametrize("unit", ["a", "1 ", "/", "\\", '"', "\0", "😀", "ab ", "<NUM> ", "x=", "a@", "1a-"])
def test_a_hostile_line_is_read_to_a_limit_and_gives_a_limited_line(unit: str) -> None:
    text = unit * (65536 // len(unit))
    line = MASKS.mask_one(text)
    assert len(line) <= digest.MAX_MASKED_CHARS
    # Whatever stands behind the limit costs nothing, since it is never looked at.
    assert line == MASKS.mask_one(text[: digest.MAX_LINE_CHARS])
    assert MASKS.mask_one(line) == line


@pytest.mark.parametrize(
    "word",
    [
        "IPv4",
        "log4j",
        "HTTP/1.1",
        "sshd2",
        "utf-8",
        "SHA256",
        "x86_64",
        "EXT4-fs",
        "TLSv1.2",
        "i18n",
        "k8s",
        "S3",
        "int64",
        "base64",
        "md5",
        "jk2_init",
    ],
)
def test_words_that_merely_hold_a_digit_stay(word: str) -> None:
    assert MASKS.mask_one(f"using {word} here") == f"using {word} here"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("blk_-1608999687919862906", "blk_7503483334202473044"),
        ("R02-M1-N0-C:J12-U11", "R10-M0-N4-C:J13-U01"),
        ("node-246", "node-7"),
        ("pod-7f9c5d-x2x8k", "pod-66bb4d-mkz4q"),
        ("req-83bc2a", "req-831429"),
        ("req_83bc2a", "req_831429"),
        ("span 00f067aa0ba902b7", "span 1234567890123456"),
        ("sha ab1234", "sha 83129f"),
        ("0x0b85eee0", "0x1"),
        ("job_200811092030_0001", "job_200811101024_0016"),
        ("[19939]", "[7]"),
        ("user1", "user4711"),
        ("core.2275", "core.1"),
        ("003b005b", "00030000"),
        ("12345678.5", "-0.25"),
        ("QuorumServer@33557fe4", "QuorumServer@1234567"),
        ("1.5s", "250ms"),
        ("900 KB", "1.2 GiB"),
        (
            "jAFDLUaE002271",
            "jAFDMVbF002272",
        ),  # sendmail's queue ids, with digits among the letters or without
        ("jAxbQeLm002274", "jAF9LUaE002271"),
        ("QBxcKLa00123", "ABcDEfG4711"),
    ],
)
def test_identifiers_of_one_kind_give_one_masked_line(first: str, second: str) -> None:
    one, other = masked([f"got {first} now", f"got {second} now"])
    assert one == other
    assert "<" in one


@pytest.mark.parametrize(
    "name", ["sda", "eth", "storage", "MySQL", "iOS", "vCPU", "HttpServer", "getHTTPSUrl", "node"]
)
def test_a_name_with_a_number_keeps_its_letters(name: str) -> None:
    assert MASKS.mask_one(f"using {name}12345 here") == f"using {name}<NUM> here"


def test_all_lines_of_one_message_of_a_mail_server_share_a_template() -> None:
    ids = ["jAFDLUaE002271", "jAFDLUaF002272", "jAF9LUaE002271", "jAGEMVbc013579"]
    assert len(set(masked([f"{i}: to=root, delay=00:00:01, stat=Sent" for i in ids]))) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('GET /a/b/1 HTTP/1.1" 200 512', 'GET /a/b/2 HTTP/1.1" 500 17'),
        ("done status=200", "done status=503"),
        ("done status: 404, retry", "done status: 200, retry"),
        ("killed by signal 9", "killed by signal 15"),
        ("exit code 1", "exit code 137"),
        ("open failed: errno 13", "open failed: errno 2"),
        ("ERROR: 42P01: bad", "ERROR: 23505: bad"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1", "NVRM: Xid (PCI:0000:3b:00): 13, pid=1"),
    ],
)
def test_codes_that_say_what_happened_keep_lines_apart(first: str, second: str) -> None:
    one, other = masked([first, second])
    assert one != other


def test_access_lines_of_one_status_are_one_masked_line() -> None:
    one, other = masked(['GET /a/b/1?x=1 HTTP/1.1" 200 512', 'GET /a/c HTTP/1.1" 200 17'])
    assert one == other == 'GET <PATH> HTTP/1.1" 200 <NUM>'


def test_a_mask_of_the_user_runs_before_the_shipped_ones(tmp_path: Path) -> None:
    own = masks_file(
        tmp_path,
        r"""
        [[mask]]
        name = "ORDER"
        pattern = '\bORD-[A-Z]{2}[0-9]+\b'
        example = 'paid ORD-XK4711 in full'
        expect = 'paid <ORDER> in full'
        """,
    )
    mine = MaskSet.load(extra=[own])
    assert mine.mask_one("refund ORD-AB12 of 7") == "refund <ORDER> of <NUM>"
    assert set(mine.tokens) - set(MASKS.tokens) == {"<ORDER>"}
    assert mine.version != MASKS.version


def test_a_file_of_the_user_switches_shipped_masks(tmp_path: Path) -> None:
    own = masks_file(tmp_path, 'enable = ["QUOTED"]\ndisable = ["LIST"]\n')
    mine = MaskSet.load(extra=[own])
    assert MASKS.mask_one('say "hello" 1 2 3') == 'say "hello" <NUM>'
    assert mine.mask_one('say "hello" 1 2 3') == 'say "<QUOTED>" <NUM> <NUM> <NUM>'


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("name='BAD'\npattern='(a'\nexample='a'", r"mask BAD: pattern '\(a' .*correct"),
        ("name='BAD'\npattern='(?=a)a'\nexample='a'", r"mask BAD: .*not a Rust regular expression"),
        ("name='BAD'\npattern='x+'\nexample='abc'", r"mask BAD: .*does not match its example 'abc'"),
        ("name='BAD'\npattern='q[0-9]+'\nexample='q1'\nexpect='q'", r"mask BAD: .*makes '<BAD>' .*not 'q'"),
        ("name='BAD'\npattern='x'\nexample='x'\npatern='y'", r"mask BAD .*unknown key 'patern'"),
        ("name='BAD'\npattern='x'", r"mask BAD .*`example` is missing"),
        ("name='BAD'\npattern='x'\nexample=1", r"mask BAD .*`example` has to be text"),
        (
            "name='BAD'\npattern='x'\nexample='x'\nenabled='no'",
            r"mask BAD .*`enabled` has to be true or false",
        ),
        ("name='bad-1'\npattern='x'\nexample='x'", r"mask 'bad-1': .*rename"),
        ("name='IP'\npattern='xyz'\nexample='xyz'", r"mask IP: two entries"),
        ("name='BAD'\npattern='x*'\nexample='x'", r"mask BAD: .*empty string"),
        ("name='BAD'\npattern='id\\s[0-9]+'\nexample='id 1'", r"mask BAD: .*line end"),
        ("name='BAD'\npattern='<<[^>]+>>'\nexample='<<a>>'", r"mask BAD: .*line end"),
        ("name='BAD'\npattern='(?s)q.q'\nexample='q q'", r"mask BAD: .*line end"),
        ("name='BAD'\npattern='x'\nexample='x'\nreplace='y'", r"mask BAD: .*without a token"),
        ("name='BAD'\npattern='(x)'\nexample='x'\nreplace='${2}<X>'", r"mask BAD: .*1 groups"),
        ("name='BAD'\npattern='(x)'\nexample='x'\nreplace='$1<X>'", r"mask BAD: .*bare \$"),
        (
            "name='BAD'\npattern='x'\nexample='x'\nreplace='<X>'\nkeep=true",
            r"mask BAD: .*cannot have `replace`",
        ),
        ("name='BAD'\npattern='BAD'\nexample='BAD'", r"<BAD>.*"),
        ("name='QQ7ZZ'\npattern='qqq'\nexample='qqq'", r"token <QQ7ZZ>.*digits"),
    ],
)
def test_a_bad_mask_is_refused_by_its_name(tmp_path: Path, entry: str, says: str) -> None:
    with pytest.raises(BadMask, match=says):
        MaskSet.load(extra=[masks_file(tmp_path, f"[[mask]]\n{entry}\n")])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mask = 1", r"\[\[mask\]\]"),
        ("[[masks]]\nname='A'", "unknown key 'masks'"),
        ("enable = ['NOPE']", "'NOPE', which is no mask"),
        ("enable = 'QUOTED'", "list of mask names"),
        ("[[mask]\n", "cannot be read"),
    ],
)
def test_a_bad_masks_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadMask, match=says):
        MaskSet.load(extra=[masks_file(tmp_path, text)])


def test_a_missing_masks_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(BadMask, match=r"gone\.toml"):
        MaskSet.load(tmp_path / "gone.toml")


def test_the_version_names_what_masks_do_and_nothing_else(tmp_path: Path) -> None:
    def version(text: str) -> str:
        return MaskSet.load(masks_file(tmp_path, text)).version

    one = version("[[mask]]\nname='A'\npattern='x+'\nexample='x'\n")
    assert one == version("# a comment\n[[mask]]\nname='A'\npattern='x+'\nexample='xx'\n")
    assert one != version("[[mask]]\nname='A'\npattern='x'\nexample='x'\n")
    assert one != version("[[mask]]\nname='B'\npattern='x+'\nexample='x'\n")


def test_every_token_in_a_masked_line_is_announced() -> None:
    lines = masked([mask.example for mask in MASKS.masks] + ["", "a\nb"])
    seen = pl.Series(lines).str.extract_all("<[A-Z0-9_]+>").explode().drop_nulls().unique()
    assert set(seen) <= set(MASKS.tokens)


@needs_log_sets
def test_masked_lines_of_twelve_public_logs_are_few_and_pure() -> None:
    purities, ratios = [], []
    for path in sorted(LOGHUB.glob("*/*_structured.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = [(row["Content"], row["EventId"]) for row in csv.DictReader(file)]
        events: dict[str, Counter[str]] = defaultdict(Counter)
        lines = masked([content for content, _ in rows])
        for line, (_, event) in zip(lines, rows, strict=True):
            events[line][event] += 1
        purities.append(sum(max(counts.values()) for counts in events.values()) / len(rows))
        ratios.append(len(events) / len({event for _, event in rows}))
        assert masked(lines) == lines
    assert len(purities) == 12
    assert sum(purities) / 12 >= 0.995
    assert min(purities) >= 0.98
    assert sum(ratios) / 12 <= 1.25
    assert max(ratios) <= 1.75
