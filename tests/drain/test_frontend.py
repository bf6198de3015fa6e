"""The front end in columns gives what line by line gives: masks by shape, headers by their head, the
benchmarks beside Drain3."""

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import polars as pl
import pytest
from drain3.masking import LogMasker
from hypothesis import given, settings
from hypothesis import strategies as st
from log_sets import DATA, needs_log_sets

from bench import _drain3, frontend, parsing
from pipeline import detect
from pipeline.drain.masking import multiline, passes
from pipeline.drain.masking import plan as masking
from pipeline.drain.masking.digits import alternatives, is_digit_invariant, normalise_digits, widened
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.masking.masks import Mask
from pipeline.drain.masking.memo import MAX_CHARS, Memo
from pipeline.drain.masking.multiline import cleaned
from pipeline.drain.masking.passes import run_on_shapes
from pipeline.drain.masking.plan import one_round
from pipeline.records.columns import PARALLEL_ROWS, kinds, per_distinct, spread
from pipeline.records.declared import Declaration
from pipeline.records.schema import raw_frame
from pipeline.settings import Settings
from pipeline.sources import formats
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.sources.formats_text import CRI, TEXT_FORMATS
from pipeline.sources.lines import LineCutter, decode
from tests.drain.test_masking import MESSAGES
from tests.sources.test_formats import EXAMPLES

MASKS = MaskSet.load()
# Digits are left where no mask takes them: shapes alone do not tell the masked line there.
SPARING = MaskSet.of(
    [
        Mask(name="ID", pattern="id[0-9]+", example="id7"),
        Mask(name="KEPT", pattern="code [0-9]+", example="code 7", keep=True),
        Mask(name="NUM", pattern="[0-9]{3,}", example="777"),
    ]
)
DIGITS = st.characters(whitelist_categories=("Nd", "Nl", "No"))
# What masking itself uses as marks, ends of lines that are no newline, and digits that are not ASCII.
HOSTILE = st.one_of(
    DIGITS,
    st.sampled_from("\ufdd0\ufdd7\ufdda\ufddb\u2028\x85\x1b\x00\u200d\ufeffſKµ٣１"),
    st.sampled_from(["<NUM>", "id", "code 7", "_\ufdd1_", "status=404", "\x1b[31m"]),
)
LINES = st.lists(st.one_of(MESSAGES, HOSTILE), max_size=5).map(" ".join)


META = frontend.meta_of(
    Chunk(records=raw_frame([]), formats=(), start=0, cursor=Cursor(path="", identity=""), position=0)
)


def masked(masks: MaskSet, messages: list[str]) -> list[str]:
    return masks.mask(pl.Series(messages, dtype=pl.String))["masked"].to_list()


def other_digits(draw: Callable[[st.SearchStrategy[str]], str], line: str) -> str:
    return "".join(draw(st.sampled_from("0123456789")) if c in "0123456789" else c for c in line)


@st.composite
def batches(draw: st.DrawFn) -> list[str]:
    """Lines of which many are equal, or equal but for their digits."""
    kinds = draw(st.lists(LINES, min_size=1, max_size=4))
    return [other_digits(draw, line) for line in draw(st.lists(st.sampled_from(kinds), max_size=20))]


@pytest.mark.parametrize("masks", [MASKS, SPARING], ids=["shipped", "sparing"])
@given(batches())
@settings(max_examples=80, deadline=None)
def test_lines_that_differ_in_digits_are_masked_as_each_alone(masks: MaskSet, messages: list[str]) -> None:
    # The memory of the set is not emptied in between, so what one example left must not harm another.
    assert masked(masks, messages) == [masks.mask_one(message) for message in messages]


PIECES = st.sampled_from(
    ["a", "word", "é", " ", "  ", "\t", "\n", "\x7f", "\x85", "\x1b[1m", "\ufdd0", "~", ""]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(PIECES, max_size=6).map("".join), min_size=1, max_size=8))
def test_many_lines_are_cleaned_as_few_are(lines: list[str]) -> None:
    one_by_one = [cleaned(pl.Series("line", [line]))[0] for line in lines]
    with mock.patch.object(multiline, "FEW_ROWS", 0):
        assert cleaned(pl.Series("line", lines)).to_list() == one_by_one


@given(st.lists(LINES, min_size=1, max_size=6), st.sampled_from(["", "x" * 5_000]))
@settings(max_examples=60, deadline=None)
def test_few_lines_are_masked_in_python_as_by_queries(messages: list[str], long: str) -> None:
    column = pl.Series([message + long for message in messages], dtype=pl.String)
    with mock.patch.object(passes, "FEW_ROWS", 0), mock.patch.object(multiline, "FEW_ROWS", 0):
        by_queries = MASKS.mask_exactly(column)
    assert MASKS.mask_exactly(column).equals(by_queries)


# Words that some mask takes for a sign, a code or a time, with some digits and not with others.
TELLING = st.sampled_from(
    ["0x1a", "5x1a", "12:34:56", "99:99:99", "ssh2", "ssh7", "ipv4", "status=200", "2026-11-22 08:01:02", "::1", "::2", "fe80::1", "fe93::1", "0000:3b:00.7", "0000:3b:00.9", "SQLSTATE 42P01", "12 Dec 2024", "_0 x1a", "a\nb 7", "\n", ""]
)  # fmt: skip


@pytest.mark.long
@given(
    st.lists(
        st.lists(st.one_of(MESSAGES, HOSTILE, TELLING), max_size=4).map(" ".join), min_size=1, max_size=3
    ),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_many_lines_of_few_shapes_are_masked_as_each_alone(kinds: list[str], data: st.DataObject) -> None:
    messages = [other_digits(data.draw, kind) for kind in kinds for _ in range(4)] * 4
    assert masked(MASKS, messages) == [MASKS.mask_one(message) for message in messages]


@pytest.mark.parametrize("digits", ["", "7", "x9y"])
def test_lines_that_seldom_repeat_are_masked_as_each_alone(digits: str) -> None:
    """Nearly all shapes are distinct at first sight, and some repeat behind it."""
    masks = MaskSet.load()
    names = [f"{chr(97 + n % 26)}{chr(97 + n // 26 % 26)}" for n in range(676)]
    messages = [f"order {n} created for anna {name}{digits} bauer" for n, name in enumerate(names)]
    messages += [f"order {n} created for anna {names[n % 90]}{digits} bauer" for n in range(200)]
    assert masked(masks, messages) == [masked(masks, [message])[0] for message in messages]


def test_of_a_few_lines_only_those_of_new_shapes_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    own = MaskSet.load()
    known = ["took 12 ms for 10.0.0.7", "user bob logged in", "user eve logged in"]
    first = masked(own, known)
    looked_at: list[str] = []

    def watched(steps: object, lines: pl.Series) -> tuple[pl.Series, pl.Series]:
        looked_at.extend(lines)
        return run_on_shapes(steps, lines)  # type: ignore[arg-type]

    monkeypatch.setattr(masking, "run_on_shapes", watched)
    assert masked(own, ["took 99 ms for 20.3.4.1", *known[1:]]) == first
    assert not looked_at
    assert masked(own, ["one more kind", *known])[1:] == first
    assert looked_at == ["one more kind"]


@pytest.fixture
def shapes_looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of shapes in each call that masks shapes."""
    looked_at: list[int] = []

    def watched(steps: object, lines: pl.Series) -> tuple[pl.Series, pl.Series]:
        looked_at.append(lines.len())
        return run_on_shapes(steps, lines)  # type: ignore[arg-type]

    monkeypatch.setattr(masking, "run_on_shapes", watched)
    monkeypatch.setattr(masking, "_MANY_LINES", 800)
    return looked_at


def test_of_many_messages_the_shapes_are_counted_though_the_first_ones_seldom_repeat(
    shapes_looked_at: list[int],
) -> None:
    """300 shapes in 2,000 messages, each at most twice among the first 512."""
    names = [f"{chr(97 + n % 20)}{chr(97 + n // 20)}" for n in range(300)]
    clocks = ("12:34:56", "99:99:99")
    messages = [
        f"order {n} of anna {names[n % 300]} bauer at {clocks[n // 300 % 2]}" for n in range(1_000, 3_000)
    ]
    exactly = MASKS.mask_exactly(pl.Series(messages))
    assert MASKS.without_memory().mask(pl.Series(messages)).equals(exactly)
    assert shapes_looked_at == [300]


@pytest.mark.parametrize(("repeated", "shapes"), [(800, [20]), (80, [])])
def test_of_messages_with_many_shapes_those_that_share_one_are_masked_by_it(
    shapes_looked_at: list[int], repeated: int, shapes: list[int]
) -> None:
    """The first 700 messages are a workload whose every shape is new."""
    names = [f"{chr(97 + n % 26)}{chr(97 + n // 26 % 26)}{chr(97 + n // 676)}" for n in range(700)]
    messages = [
        f"order 7{name} of 3f2504e0-4f89-41d3-9a0c-0305e82c3301 created, status=404" for name in names
    ]
    often = [f"{names[n % 20]} took {n} ms at 12:34:56 on 0x{n}" for n in range(100, 100 + repeated)]
    column = pl.Series([*messages, *often, *messages[:40], "a\nb 7"])
    assert MASKS.without_memory().mask(column).equals(MASKS.mask_exactly(column))
    assert shapes_looked_at == shapes


def test_the_shipped_masks_run_over_lines_of_ones() -> None:
    assert MASKS.plan.shape_steps
    run = [step for behind in MASKS.plan.shape_steps for step in behind.passes]
    assert [step for step in MASKS.plan.passes if not step.all_by_digits] == run


@pytest.mark.parametrize(
    ("pattern", "example", "line", "told"),
    [
        (r"(?-u:\b)0x[0-9a-f]+(?-u:\b)", "0x7f", "fault at 0x00c8 cpu 200", "fault at <OWN> cpu <NUM>"),
        ("slot-[c5][0-9]{3,}", "slot-5123", "slot-c1234 a", "<OWN> a"),
        ("job [A5]-[0-9]+", "job 5-1", "job A-12 done", "<OWN> done"),
    ],
)
def test_a_mask_that_tells_digits_apart_finds_what_it_finds_beyond_them(
    pattern: str, example: str, line: str, told: str
) -> None:
    number = Mask(name="NUM", pattern="(?-u:\\b)[0-9]+(?-u:\\b)", example="7")
    masks = MaskSet.of([Mask(name="OWN", pattern=pattern, example=example), number])
    assert masked(masks, [line] * 400) == [told] * 400
    assert masks.mask_one(line) == told


def test_a_shape_that_spares_digits_is_not_taken_for_a_line_of_ones() -> None:
    assert masked(SPARING, ["a 12", "a 11", "a 99"]) == ["a 12", "a 11", "a 99"]
    assert masked(SPARING, ["a 11"]) == ["a 11"]
    assert masked(SPARING, ["code 11 id5", "code 12 id6"]) == ["code 11 <ID>", "code 12 <ID>"]


def test_the_shipped_masks_end_in_passes_that_see_no_digit() -> None:
    assert MASKS.plan.digit_invariant
    assert [step for group in MASKS.plan.groups for step in group.passes] + list(
        MASKS.plan.digit_invariant
    ) == list(MASKS.plan.passes)


@pytest.mark.parametrize(
    "pattern",
    ["[0-9]+", r"\d{3}", "[A-Za-z0-9_.-]", "[^0-9]x", r"(?-u:\b{start-half})a{2,7}", "(?i)x|(?:y)", "(?P<n1>a)", r"\w\.[+-~]", "µs"],
)  # fmt: skip
def test_a_pattern_that_holds_all_digits_or_none_sees_no_difference(pattern: str) -> None:
    assert is_digit_invariant(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["1", "[1-9]", "[0-35-9]", "[0-8]", "x{1}2", "[!-0-9]", "[a-0-9]", "[0-9--5]", "[0-9&&[^5]]", r"\x31", r"\p{Nd}", "[[:digit:]]", "[0-9[a]]", "(?x)a", r"[\d5]", "0-9", r"a\{1\}", "[]0]", "[^]{3}]", "[^](?P<a1>x)]"],
)  # fmt: skip
def test_a_pattern_that_may_tell_digits_apart_is_not_trusted(pattern: str) -> None:
    assert not is_digit_invariant(pattern)


@given(
    st.lists(
        st.sampled_from(
            ["[0-9]", "[^0-9]", "[1-9]", "[0-4a-z]", r"\d", r"\w", "7", "a", ".", "[+-~]", "[ -/]", "(?:", ")", "|", "+", "{2}", r"\b"]
        ),
        min_size=1,
        max_size=8,
    ).map("".join),
    st.lists(st.text("0123456789ab-", max_size=8), min_size=1, max_size=4),
    st.data(),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_a_trusted_pattern_matches_the_same_places_whatever_the_digits(
    pattern: str, lines: list[str], data: st.DataObject
) -> None:
    if not is_digit_invariant(pattern):
        return
    changed = [
        "".join(data.draw(st.sampled_from("0123456789")) if c.isdigit() else c for c in line)
        for line in lines
    ]
    try:
        places = [
            pl.Series(texts).str.replace_all(pattern, "<$0>").str.replace_all("[0-9]", "1")
            for texts in (lines, changed)
        ]
    except pl.exceptions.ComputeError:  # no regular expression
        return
    assert places[0].to_list() == places[1].to_list()


PARTS = [
    "[0-9]",
    "[^0-9]",
    "[1-9]",
    "[0-4a-z]",
    "[^2-5]",
    r"\d",
    r"\w",
    "7",
    "a",
    ".",
    "[+-~]",
    "[ -/]",
    "(?:",
    "(",
    ")",
    "|",
    "+",
    "?",
    "{2}",
    r"\b",
]


@given(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=8).map("".join),
    st.text("0123456789ab-", max_size=8),
    st.data(),
)
@settings(max_examples=500, deadline=None)
def test_a_wider_pattern_misses_no_match_whatever_the_digits(
    pattern: str, line: str, data: st.DataObject
) -> None:
    try:
        hit = pl.Series([line]).str.contains(pattern)[0]
    except pl.exceptions.ComputeError:  # no regular expression
        return
    wider = widened(pattern)
    assert wider is not None
    assert not hit or pl.Series([other_digits(data.draw, line)]).str.contains(wider)[0]
    assert "|".join(alternatives(pattern)) == pattern
    parts = [pl.Series([line]).str.contains(part)[0] for part in alternatives(pattern)]
    assert hit == any(parts)


@pytest.mark.parametrize("pattern", ["(?i)a|b", "[[:alpha:]]|b", "(?:a|b)", "(a|b)c", r"a\|b", "[|]"])
def test_a_pattern_with_no_outermost_bar_or_one_not_understood_stays_whole(pattern: str) -> None:
    assert alternatives(pattern) == (pattern,)


@given(st.lists(LINES.map(lambda line: line.replace("\n", " ")), max_size=6))
def test_equal_digits_are_ones(lines: list[str]) -> None:
    column = pl.Series("x", lines, dtype=pl.String)
    assert normalise_digits(column).to_list() == column.str.replace_all("[0-9]", "1").to_list()


def test_a_memory_is_bounded_keeps_what_is_asked_for_and_refuses_long_texts() -> None:
    memo, asked = Memo(4), []

    def work(texts: list[str]) -> list[str]:
        asked.extend(texts)
        return [text.upper() for text in texts]

    for turn in range(50):
        assert memo.recall(["stays", f"t{turn}"], work) == ["STAYS", f"T{turn}"]
        assert len(memo) <= 8
    assert asked.count("stays") == 1
    memo.recall(["x" * (MAX_CHARS + 1)] + [f"n{i}" for i in range(100)], work)
    assert len(memo) <= 8
    assert memo.recall([], work) == []
    assert memo.recall(["a", "stays", "a", "b", "a"], work) == ["A", "STAYS", "A", "B", "A"]
    assert asked.count("a") == 1


def test_a_memory_is_bounded_in_characters_too() -> None:
    memo = Memo(entries=1_000, chars=100)
    for turn in range(50):
        memo.recall([f"{turn:020}"], lambda texts: texts)
        assert len(memo) <= 4
    memo.recall(["y" * 60], lambda texts: texts)
    assert len(memo) <= 4


@pytest.mark.long
def test_seldom_masks_that_are_too_large_for_one_expression_are_looked_for_one_by_one() -> None:
    large = [
        Mask(name=f"L{c}", pattern=rf"q{c}7=\w{{100}}", example=f"q{c}7=" + "x" * 100, seldom=True)
        for c in "ABCD"
    ]
    found = MaskSet.of([*large, Mask(name="KEPT", pattern=r"k\d", example="k1", keep=True)])
    assert [group.gate for group in found.plan.groups if group.passes[0].seldom] == [""]
    assert masked(found, ["hello 12", large[2].example + " k1"]) == ["hello 12", "<LC> k1"]


@given(st.lists(st.text("ab1", max_size=2), max_size=30))
def test_work_on_distinct_values_or_in_slices_is_work_on_all(values: list[str]) -> None:
    column = pl.Series("x", values * 100, dtype=pl.String)
    wanted = column.str.to_uppercase()
    assert per_distinct(column, lambda few: few.str.to_uppercase()).to_list() == wanted.to_list()
    many = pl.concat([column] * (PARALLEL_ROWS // max(column.len(), 1) + 1))
    assert spread(many, pl.col("x").str.to_uppercase()).to_list() == many.str.to_uppercase().to_list()


@given(st.lists(st.one_of(HOSTILE, st.text(max_size=3)), max_size=12), st.sampled_from([1, 2, 300]))
@settings(max_examples=60, deadline=None)
def test_kinds_come_in_the_order_of_their_first_rows(values: list[str], times: int) -> None:
    values = values * times
    few, which = kinds(pl.Series("x", values, dtype=pl.String))
    assert few.to_list() == list(dict.fromkeys(values))
    assert few[which].to_list() == values


# --- bytes to records

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r\r\n", b"\n\n", b"\r"])
PLAIN = (
    b"Dec 10 06:55:46 host sshd[42]: Failed password for root from 10.0.0.7 port 22 ssh2",
    b"\xef\xbb\xbfa",
    b"",
)
BITS = st.sampled_from(
    [
        *PLAIN,
        b"Dec 31 23:59:60 h a[1]: x 0x1f",
        b"Feb 29 00:00:00 h a: \xff y",
        b"\ttab",
        b"\x00 nul",
        "é ٣ \u2028 z".encode(),
    ]
)


@given(
    st.lists(st.tuples(BITS, ENDS), max_size=8).map(lambda rows: b"".join(a + b for a, b in rows)), st.data()
)
@settings(max_examples=80, deadline=None)
def test_bytes_cut_anywhere_give_the_lines_that_cutting_at_newlines_gives(
    text: bytes, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    cutter, rows = LineCutter(), []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        rows += cutter.push(text[start:stop])["raw"].to_list()
    rows += cutter.finish()["raw"].to_list()
    wanted = [decode(line.removesuffix(b"\r")) for line in text.split(b"\n")]
    if not text.endswith(b"\n") and text:
        wanted[-1] = rows[-1]  # a last line without a newline keeps what may yet be its carriage return
    else:
        wanted.pop()
    assert rows == [wanted[0].removeprefix("\ufeff"), *wanted[1:]] if wanted else rows == []


@pytest.mark.long
@given(
    st.lists(
        st.sampled_from([example[1] for example in EXAMPLES if "\n" not in example[1]]),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 40),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_a_batch_of_lines_is_prepared_as_each_line_alone(
    lines: list[str], times: int, data: st.DataObject
) -> None:
    raw = [other_digits(data.draw, data.draw(st.sampled_from(lines))) for _ in range(times)]
    names = formats.detect(lines)
    meta = replace(META, formats=names)
    whole = detect.prepare(raw_frame(raw), meta, MASKS)
    alone = [detect.prepare(raw_frame([line]), meta, MASKS) for line in raw]
    each = pl.concat(alone)
    # A line without a time takes that of the line before it, and has none alone.
    clock = ("timestamp", "timed")
    assert whole.drop("line", *clock).equals(each.drop("line", *clock))
    assert whole.filter(each["timed"]).select(clock).equals(each.filter("timed").select(clock))
    assert whole["masked"].to_list() == [MASKS.mask_one(message) for message in whole["message"]]


# --- headers

FORMATS = [*TEXT_FORMATS, CRI]


def whole(form: Declaration, raw: pl.Series) -> pl.DataFrame:
    return raw.str.extract_groups("(?s)" + form.pattern).struct.unnest()


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_header_split_off_is_the_header_captured_with_its_message(
    form: Declaration, data: st.DataObject
) -> None:
    from pipeline.sources.formats import _captured

    line = data.draw(st.sampled_from([example[1] for example in EXAMPLES]))
    cut = data.draw(st.integers(0, len(line)))
    bit = data.draw(
        st.one_of(
            st.just(""), st.sampled_from([" ", ":", "\n", "[", "]", "é", "INFO", " - "]), st.text(max_size=3)
        )
    )
    raw = pl.Series(
        "raw", [line, line[:cut] + bit + line[cut:], line[:cut] + bit + line[cut + 1 :], line[:cut]]
    )
    wanted = whole(form, raw)
    assert _captured(raw, "(?s)" + form.pattern).select(wanted.columns).equals(wanted)


# --- beside Drain3


def samples() -> Iterator[tuple[str, list[str]]]:
    for path in sorted((DATA / "loghub_2k").glob("*/*_structured.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            yield path.parent.name, list(dict.fromkeys(row["Content"] for row in csv.DictReader(file)))


def test_masks_in_python_give_what_ours_give() -> None:
    python = LogMasker(_drain3.instructions(MASKS), "<", ">")
    examples = [mask.example for mask in MASKS.masks]
    assert [python.mask(line) for line in examples] == one_round(
        MASKS.plan, pl.Series("x", examples)
    ).to_list()


@pytest.mark.long
@needs_log_sets
def test_masks_in_python_give_what_ours_give_on_public_logs() -> None:
    python = LogMasker(_drain3.instructions(MASKS), "<", ">")
    for system, messages in samples():
        lines = cleaned(pl.Series("x", messages[:400]))
        lines = lines.filter(lines != "")
        got = pl.Series("x", [python.mask(line) for line in lines])
        ours = one_round(MASKS.plan, lines)
        assert got.filter(got != ours).to_list() == [], system


@needs_log_sets
def test_public_logs_are_masked_as_line_by_line() -> None:
    for system, messages in samples():
        column = pl.Series(messages)
        plain = MASKS.mask_exactly(column)
        assert MASKS.mask(column).equals(plain), system
        assert MASKS.mask(column).equals(plain), system  # and with everything remembered


def test_the_frontend_bench_answers_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "ROUNDS", 1)
    text = "".join(
        f"081110 01{n % 60:02}00 5 INFO dfs.Node: sent blk_{n} to 10.0.0.{n % 250}\n" for n in range(600)
    )
    values = frontend.compare(text.encode(), MASKS, Settings())
    assert values["lines"] == 600
    assert set(values) == {"lines", "drain3_lines_per_s", "lines_per_s", "ratio", "cold_ratio", "us_per_line"}


def test_grouping_accuracy_counts_whole_groups_alone() -> None:
    events = ["a", "a", "b", "b", "c"]
    assert parsing.accuracy([1, 1, 2, 2, 3], events) == (1.0, 1.0)
    assert parsing.accuracy([1, 1, 2, 4, 3], events) == (0.6, round(2 * 2 / (4 + 3), 4))
    assert parsing.accuracy([1, 1, 1, 1, 1], events) == (0.0, 0.0)


@pytest.mark.long
@needs_log_sets
def test_our_templates_group_public_logs_no_worse_than_published() -> None:
    values = parsing.measure(DATA)
    assert set(values["systems"]) == set(parsing.PUBLISHED)
    assert values["ga"] >= 0.85
    assert values["fga"] >= 0.74
