"""The part of a long text that is shown."""

import pytest

from pipeline.report.excerpt import LEAD, shortened, telling

LONG = "padding " * 60


def test_a_short_text_is_shown_whole() -> None:
    assert shortened("one\ntwo", ["two"], 7) == "one\ntwo"


@pytest.mark.parametrize("word", ["refused", "Refused", "REFUSED", "ConnectionRefusedHere"])
def test_a_long_line_is_cut_around_its_error_word(word: str) -> None:
    line = f"{LONG}connection {word} by ledger {LONG}"
    text = shortened(line, telling("refused"), 120)
    assert len(text) <= 120 and text.startswith("…padding") and text.endswith("…")
    assert 0 < text.index(word) <= LEAD + 11


def test_a_line_whose_error_word_stands_early_keeps_its_beginning() -> None:
    line = f"2026-11-20 10:00:01 ERROR {'a' * 40} refused by ledger {LONG}"
    assert shortened(line, ["refused"], 160) == f"{line[:159]}…"


def test_a_line_without_a_telling_word_keeps_its_beginning() -> None:
    assert shortened(LONG, ["absent"], 50) == f"{LONG[:49]}…"


@pytest.mark.parametrize(
    "thrown",
    ["pg8000.exceptions.DatabaseError: {'M': 'no space'}", "Caused by: java.io.IOException: no space",
     "panic: no space", "sqlx::error::PoolTimeout: no space"],
)  # fmt: skip
def test_a_stack_trace_keeps_its_first_line_and_what_was_thrown(thrown: str) -> None:
    frames = [f'  File "/srv/shop/a{n}.py", line {n}, in serve' for n in range(30)]
    trace = "\n".join(["10:00:01 ERROR POST /orders failed", "Traceback", *frames, thrown])
    shown = thrown.replace("java.io.", "").replace("pg8000.exceptions.", "")
    assert shortened(trace, telling(trace), 200) == f"10:00:01 ERROR POST /orders failed\n…\n{shown}"


def test_a_chain_of_causes_keeps_its_first_and_its_last() -> None:
    frames = [f"\tat shop.Cart.serve(Cart.java:{n})" for n in range(30)]
    thrown = [
        "shop.CartException: not saved",
        *frames,
        "Caused by: shop.A: x",
        "Caused by: a.b.DiskError: full",
    ]
    trace = "\n".join(["ERROR POST /orders failed", *thrown])
    shown = ["ERROR POST /orders failed", "CartException: not saved", "…", "Caused by: DiskError: full"]
    assert shortened(trace, telling(trace), 200) == "\n".join(shown)


@pytest.mark.parametrize("text", ["", "\n" * 900, "x" * 900, ("Error: " + "y" * 300 + "\n") * 3])
@pytest.mark.parametrize("chars", [20, 100, 240])
def test_no_text_is_longer_than_asked_for(text: str, chars: int) -> None:
    assert len(shortened(text, ["error", "x"], chars)) <= chars
