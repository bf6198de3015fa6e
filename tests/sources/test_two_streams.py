"""Two streams of one container: the pieces of a line belong together, the lines of the streams apart."""

import json
from itertools import pairwise

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.sources.chunks import Assembly, Chunk, Cursor
from pipeline.sources.framing import Framer

T = "2026-11-20T10:00:00.1Z"


def cri(stream: str, text: str, *, partial: bool = False) -> str:
    return f"{T} {stream} {'P' if partial else 'F'} {text}"


def docker(stream: str, text: str, *, partial: bool = False) -> str:
    return json.dumps(
        {"log": text + ("" if partial else "\n"), "stream": stream, "time": T}, separators=(",", ":")
    )


@pytest.mark.parametrize("line", [cri, docker])
def test_an_error_between_the_pieces_of_a_line_is_a_record_of_its_own(line) -> None:  # type: ignore[no-untyped-def]
    lines = [
        line("stdout", "INFO order 1"),
        line("stdout", "INFO order 2 ", partial=True),
        line("stderr", "ERROR disk is full"),
        line("stdout", "has many ", partial=True),
        line("stderr", "ERROR no ", partial=True),
        line("stdout", "items"),
        line("stderr", "space"),
        line("stdout", "INFO order 3"),
    ]
    framer = Framer()
    rows = pl.concat([framer.feed(lines), framer.flush()])
    expected = [[0], [1, 3, 5], [2], [4, 6], [7]]
    assert rows["raw"].to_list() == ["\n".join(lines[row] for row in record) for record in expected]
    assert rows["line"].to_list() == [record[0] + 1 for record in expected]
    assert rows["lines"].to_list() == [len(record) for record in expected]


def test_a_trace_of_one_stream_takes_no_line_of_the_other() -> None:
    lines = [
        cri("stderr", "ERROR boom"),
        cri("stderr", "\tat shop.Cart.pay(Cart.java:7)"),
        cri("stdout", "  an indented line of the other"),
        cri("stderr", "\tat shop.Main.main(Main.java:3)"),
    ]
    framer = Framer()
    rows = pl.concat([framer.feed(lines), framer.flush()])
    assert rows["lines"].to_list() == [2, 1, 1]


def test_lines_do_not_wait_for_ever_for_the_end_of_a_line() -> None:
    framer = Framer()
    lines = [cri("stdout", "no end", partial=True), *[cri("stderr", "INFO x")] * 5_000]
    assert framer.feed(lines).height > 4_000
    assert framer.flush()["lines"].sum() > 0


ROW = st.tuples(st.sampled_from(["stdout", "stderr"]), st.sampled_from(["INFO a", "\tat b", "ERROR c", ""]), st.booleans())  # fmt: skip


def texts_of(rows: list[tuple[str, str, bool]]) -> list[str]:
    return [
        cri(stream, f"{text} {number}", partial=partial)
        for number, (stream, text, partial) in enumerate(rows)
    ]


@settings(max_examples=25, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_the_order_does_not_depend_on_the_feeds_and_no_line_is_lost(
    rows: list[tuple[str, str, bool]], cuts: list[int]
) -> None:
    lines = texts_of(rows)

    def framed(edges: list[int]) -> pl.DataFrame:
        framer = Framer(sample=[cri("stdout", "INFO a")] * 200)
        return pl.concat([*(framer.feed(lines[a:b]) for a, b in pairwise(edges)), framer.flush()])

    whole = framed([0, len(lines)])
    assert framed([0, *sorted(min(cut, len(lines)) for cut in cuts), len(lines)]).equals(whole)
    assert sorted("\n".join(whole["raw"]).split("\n")) == sorted(lines)
    for raw in whole["raw"]:
        assert len({line.split(" ")[1] for line in raw.split("\n")}) == 1


@settings(max_examples=15, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=40), st.integers(200, 4000), st.integers(1, 4), st.data())
def test_a_reader_that_goes_on_behind_any_chunk_reads_the_rest(
    rows: list[tuple[str, str, bool]], block: int, most: int, data: st.DataObject
) -> None:
    text = "".join(f"{line}\n" for line in [*[cri("stdout", "INFO a")] * 200, *texts_of(rows)]).encode()

    def chunks(start: Cursor, block: int) -> list[Chunk]:
        assembly = Assembly(start, max_records=most)
        if start.offset:
            assembly.framer.look(pl.Series(text.decode().split("\n")), final=True)
        found: list[Chunk] = []
        for at in range(start.offset, len(text), block):
            found += assembly.push(text[at : at + block], at)
        return [*found, *assembly.finish(len(text))]

    whole = chunks(Cursor(path="a", identity="i"), len(text))
    cut = chunks(Cursor(path="a", identity="i"), block)
    assert [chunk.cursor for chunk in cut] == [chunk.cursor for chunk in whole]
    number = data.draw(st.integers(0, len(whole) - 1))
    rest = chunks(whole[number].cursor, len(text))
    read = [raw for chunk in [*whole[: number + 1], *rest] for raw in chunk.records["raw"]]
    assert sorted("\n".join(read).split("\n")) == sorted(text.decode().splitlines())
