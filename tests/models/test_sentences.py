"""Sentences: what was never said stands out in any language, and a name where names change does not."""

from collections.abc import Iterable
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadBundle
from pipeline.models.known.sentences import LEAST, Sentences, _bounds, words_of

SAID = [
    ("DB saved on disk in <NUM> ms", 3_000),
    ("array md0 is healthy", 500),
    ("支付成功 <NUM>", 400),
    ("job_done in <NUM> ms", 500),
    *((f"user {name} logged in", 3) for name in ("ann", "bob", "carl", "dora", "emil", "fay", "gus", "hal")),
]


def learnt(lines: Iterable[tuple[str, int]], **bound: float) -> Sentences:
    """Of one workload."""
    return Sentences.fit(((text, count, "") for text, count in lines), **bound)


KNOWN = learnt(SAID)


@pytest.mark.parametrize(
    ("line", "usual"),
    [
        ("DB lost on disk in <NUM> ms", "saved"),
        ("array md0 is degraded", "healthy"),
        ("job_hung in <NUM> ms", "done"),
        ("支付失败 <NUM>", ""),
        ("DB saved on disk in <NUM> hours", ""),
        ("le verrou n'a jamais été rendu", ""),
        ("no space left on device", ""),
    ],
)
def test_a_sentence_that_was_never_said_is_news(line: str, usual: str) -> None:
    news = KNOWN.news(line)
    assert news is not None and news.nats >= LEAST
    assert news.usual == usual


@pytest.mark.parametrize(
    "line",
    [
        "DB saved on disk in <NUM> ms",
        "DB saved on disk in 17 ms",
        "x9f31-aa77 <UUID> MovedRegionsCleaner",
        "",
        "user <*> logged in",
    ],
)
def test_what_was_said_and_what_is_no_word_is_no_news(line: str) -> None:
    assert KNOWN.news(line) is None


def test_a_new_name_where_names_change_is_less_strange_than_a_new_word_where_one_stood() -> None:
    name, word = KNOWN.news("user ivy logged in"), KNOWN.news("array md0 is degraded")
    assert word is not None and (name is None or name.nats < word.nats)


def test_a_steady_log_finds_the_same_sentence_stranger_than_a_chatty_one() -> None:
    chatty = learnt((f"{a} {b} today", 1) for a in ("cat", "dog", "cow") for b in ("runs", "eats", "hides"))
    steady, there = KNOWN.news("array md0 is degraded"), chatty.news("cat sleeps today")
    assert steady is not None and (there is None or there.nats < steady.nats)


def test_a_log_that_says_many_things_once_shows_the_strangest_alone() -> None:
    words = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven")
    once = [(f"the {word} tower was seen near {word}s", 1) for word in words]
    steady, chatty = learnt(SAID), learnt([*SAID, *once], allowed=2)
    assert chatty.least[""] > steady.least[""] == LEAST
    assert learnt([*SAID, *once], allowed=1e9).least == {"": LEAST}


def test_a_chatty_workload_does_not_silence_a_steady_one() -> None:
    words = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven")
    chat = [(f"the {word} tower was seen near {word}s", 1, "chat") for word in words]
    said = [(text, count, "steady") for text, count in SAID]
    both = Sentences.fit([*said, *chat], allowed=2)
    assert both.least["steady"] == LEAST < both.least[""] <= both.least["chat"]
    line = "array md0 is degraded"
    assert both.news(line, "steady") is not None
    assert both.news(line, "chat") is both.news(line, "another one") is None


def test_what_steady_workloads_do_not_need_is_left_to_chatty_ones() -> None:
    before = {
        "chat": [float(n) for n in range(30, 10, -1)],
        "steady": [7.0],
        "silent": [],
        "others": [3.0] * 9,
    }
    bounds = _bounds(before, 4)
    assert bounds == {"": 26.0, "chat": 27.0, "steady": LEAST, "silent": LEAST, "others": LEAST}
    assert _bounds({"a": [9.0, 8.0, 7.0], "b": [29.0, 28.0, 27.0]}, 2) == {"": 27.0, "a": 8.0, "b": 28.0}


def test_without_any_line_nothing_is_news() -> None:
    assert learnt([]).news("no space left on device") is None


def test_words_survive_their_file(tmp_path: Path) -> None:
    KNOWN.write(tmp_path / "s.parquet")
    back = Sentences.read(tmp_path / "s.parquet")
    for line in ("DB lost on disk in <NUM> ms", "user ivy logged in", "支付失败 <NUM>", "all is new here"):
        assert back.news(line) == KNOWN.news(line)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 900])
def test_a_damaged_file_is_a_bad_bundle(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s.parquet").write_bytes(content)
    with pytest.raises(BadBundle, match="publish"):
        Sentences.read(tmp_path / "s.parquet")
    pl.DataFrame({"word": [1]}).write_parquet(tmp_path / "s.parquet")
    with pytest.raises(BadBundle, match="publish"):
        Sentences.read(tmp_path / "s.parquet")


@given(st.text(max_size=400))
def test_any_text_has_words_and_a_bounded_strangeness(text: str) -> None:
    assert words_of(text)[0] == "^" and words_of(text)[-1] == "$"
    news = KNOWN.news(text)
    assert news is None or LEAST <= news.nats < 64 * 200


@given(st.lists(st.text(max_size=60), max_size=8))
def test_a_line_of_the_sample_is_never_news(lines: list[str]) -> None:
    known = learnt((line, 5) for line in lines)
    assert all(known.news(line) is None for line in lines)
