"""What continues a record, and what begins one without a header: whatever the file is full of."""

import time

import polars as pl
import pytest

from pipeline.records.traces import KINDS, pattern_of, trace_lines
from pipeline.sources.framing import Framer
from tests.sources.traces import BELOW, CALM, CRASHES, ERROR

HEADED = [CALM.format(i, i) for i in range(30)]
PLAIN = [f"order {i} shown" for i in range(30)]
HEADLINES = {"headed": (HEADED, ERROR), "plain": (PLAIN, "payment failed")}


def records_of(lines: list[str]) -> list[tuple[str, str | None]]:
    framer = Framer()
    rows = pl.concat([framer.feed(lines), framer.flush()])
    assert int(rows["lines"].sum()) == len(lines)
    return rows.select("raw", "level").rows()


def test_every_example_of_the_table_is_of_its_kind() -> None:
    assert {entry.kind for entry in trace_lines()} == set(KINDS)
    for entry in trace_lines():
        assert entry.examples, entry
        for example in entry.examples:
            assert pl.Series([example]).str.contains(f"^(?:{entry.pattern})").item(), (entry.kind, example)


def test_calm_lines_are_nothing_in_the_table() -> None:
    words = (
        "no errors found; all files were read; shop.example; a/b c; 1.2.3; docs/readme.md; main.py; src/shop/cart.go; "
        "fatal errors: 0; out of memory events: 0; unhandled exception count: 0; on startup; with 3 workers; "
        "set cookie; from now on; update done; where is it; killed 3 processes; panic mode off; error count 0; "
        "thread 7 done; goroutines: 12; caused by nothing; exited with 0; C:/shop/a.txt; http://shop.example/Cart"
    )
    calm = pl.Series([*HEADED, *PLAIN, *words.split("; ")])
    assert not calm.str.contains(pattern_of(*KINDS)).any()


@pytest.mark.parametrize("lines", [HEADED, PLAIN], ids=["headed", "plain"])
@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_in_a_calm_file_is_a_record_of_its_own(name: str, lines: list[str]) -> None:
    level, crash = CRASHES[name]
    found = records_of([*lines, *crash.split("\n"), *lines[:3]])
    assert found == [(line, None) for line in lines] + [(crash, level)] + [(line, None) for line in lines[:3]]


# Without any header, a brace may begin a document.
@pytest.mark.parametrize(
    ("name", "lines"),
    [(name, lines) for name in BELOW for lines in HEADLINES if (name, lines) != ("json", "plain")],
)
def test_a_trace_belongs_to_the_error_above_it(name: str, lines: str) -> None:
    calm, headline = HEADLINES[lines]
    found = records_of([*calm, headline, *BELOW[name].split("\n"), *calm[:3]])
    assert [raw for raw, _ in found[30:]] == [f"{headline}\n{BELOW[name]}", *calm[:3]]


@pytest.mark.parametrize("name", BELOW)
def test_a_file_full_of_traces_joins_as_a_calm_one_does(name: str) -> None:
    error = f"{ERROR}\n{BELOW[name]}"
    for calm in (0, 1, 3):
        records = [*HEADED[:calm], error] * 12
        assert [raw for raw, _ in records_of("\n".join(records).split("\n"))] == records


def several(head: str, *below: str) -> list[str]:
    return [
        "\n".join((head.replace("{}", str(i)), *(line.replace("{}", str(i)) for line in below)))
        for i in range(10)
    ]


FULL = {
    "sql": several("2026-11-20 10:00:0{},000 DEBUG [main] orm.SQL - ", "select o.id", "from orders o", "where o.id = ?"),
    "message of several lines": several("2026-11-20 10:00:0{},000 ERROR [main] shop.Query: cannot parse", "fromm orders", "in line {}"),
    "nginx": several('2026/11/20 10:00:0{} [error] 20#20: *7 FastCGI sent in stderr: "PHP message: no sku', 'PHP message: no cart" while reading, client: 10.0.0.1'),
    "queue manager": several("11/20/2026 10:00:0{} AM - Process(12.1) User(mqm)", "    Host(h) Installation(I1)", "", "AMQ5026I: listener {} has started.", "", "EXPLANATION:", "The listener process has started.", "ACTION:", "None.", "----- amqxfdcx.c : 822 ------------------"),
    "database audit": several("Fri Nov 20 10:00:0{} 2026 -04:00", "LENGTH : '275'", "ACTION :[7] 'CONNECT'", "DATABASE USER:[1] '/'"),
    "collector of garbage": several("2026-11-20T10:00:0{}.123+0000: 0.1: [GC (Allocation Failure) Desired survivor size 10 bytes", "[PSYoungGen: 65536K->5120K(76288K)] 65536K->5128K(251392K), 0.006 secs]"),
    "xml": several("2026-11-20 10:00:0{},000 INFO [main] shop.Soap - request", "<soap:Envelope>", "{}", "</soap:Envelope>"),
    "json": several("[2026-11-20T10:00:0{},123][WARN ][i.s.s.query] [n] took[1s], source[", "{", '"query": {}', "}", "]"),
    "statement": several("2026-11-20 10:00:0{} UTC [71] LOG:  statement: select *", "from orders", "where id = {}"),
}  # fmt: skip


@pytest.mark.parametrize("name", FULL)
def test_lines_below_a_header_that_tells_of_them_belong_to_it(name: str) -> None:
    records = FULL[name]
    assert [raw for raw, _ in records_of("\n".join(records).split("\n"))] == records


def test_rows_of_a_table_keep_their_values_of_several_lines() -> None:
    """As PostgreSQL writes csvlog; the sample ends within a value."""
    head = "2026-11-20 10:00:0{}.578 UTC,,,23,,6.2,{},,2026-11-20 09:00:00 UTC,5/2,0,LOG,00000"
    records = (
        several(f'{head},"automatic vacuum of ""a"": index scans: 1', "pages: 0", 'CPU: 9.42 s",,,,,,,,,""')
        * 10
    )
    found = records_of("\n".join(records).split("\n"))
    assert [raw for raw, _ in found] == records


def test_a_trace_below_a_calm_line_is_its_own_record_and_below_a_grave_one_a_part() -> None:
    trace = CRASHES["python"][1]
    warning = HEADED[0].replace("INFO", "WARN")
    for head in (ERROR, warning, "2026-11-20 10:00:30,123 INFO [main] shop.Cart: retry after an exception"):
        found = records_of([*HEADED, *head.split("\n"), *trace.split("\n"), HEADED[0]])
        assert found[30:] == [(f"{head}\n{trace}", None), (HEADED[0], None)]


@pytest.mark.parametrize(
    "line",
    ["a." * 30_000, "(" * 60_000, "x: " * 20_000, "main/" * 12_000, " " * 60_000 + "x", "*** " * 15_000, "Killed" + " " * 60_000 + "x"],
    ids=["dots", "brackets", "colons", "slashes", "blanks", "stars", "end"],
)  # fmt: skip
def test_a_hostile_line_is_read_in_linear_time(line: str) -> None:
    began = time.process_time()
    records_of([line] * 20)
    assert time.process_time() - began < 5.0


def test_a_file_of_nothing_but_crashes_is_read_in_linear_time() -> None:
    began = time.process_time()
    assert (
        len(records_of(["panic: x", "Traceback (most recent call last):", "", "Killed"] * 10_000)) == 10_000
    )
    assert time.process_time() - began < 5.0
