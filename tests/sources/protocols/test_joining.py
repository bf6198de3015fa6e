"""Stack traces that a shipper split into records."""

from collections.abc import Sequence

from pipeline.sources.protocols.joining import MAX_BYTES, MAX_LINES, continuations, heads, joined_text

JAVA = (
    "ERROR boom",
    "\tat a.b.C(C.java:1)",
    "Caused by: java.io.IOException: y",
    "\t... 7 more",
    "... 7 more",
)
PYTHON = (
    "ERROR boom", "Traceback (most recent call last):", '  File "a.py", line 1, in f', "    go()", "ValueError: 7", "",
    "During handling of the above exception, another exception occurred:", "", "Traceback (most recent call last):",
    '  File "a.py", line 3, in f', "KeyError: 8",
)  # fmt: skip


def joined(texts: Sequence[str | None], streams: Sequence[str] = ()) -> list[str | None]:
    found = continuations(texts, streams.__getitem__ if streams else lambda i: "")
    return [
        joined_text(texts, i, found[i]) if i in found else texts[i] for i in heads(len(texts), found)
    ]  # fmt: skip


def test_the_lines_of_a_stack_trace_become_one_record() -> None:
    assert joined(["INFO a", *JAVA, "INFO b"]) == ["INFO a", "\n".join(JAVA), "INFO b"]


def test_a_chain_of_tracebacks_ends_with_its_last_exception() -> None:
    assert joined([*PYTHON, "INFO b"]) == ["\n".join(PYTHON), "INFO b"]


def test_a_whole_traceback_in_one_record_takes_no_record_behind_it() -> None:
    trace = "\n".join(PYTHON)
    assert joined([trace, "INFO b", trace, "    c"]) == [trace, "INFO b", trace + "\n    c"]


def test_streams_that_mix_are_joined_apart() -> None:
    texts = ["ERROR a", "ERROR b", "\tat a", "\tat b", "INFO a", "\tat b2"]
    assert joined(texts, "ababab") == ["ERROR a\n\tat a", "ERROR b\n\tat b\n\tat b2", "INFO a"]


def test_a_continuation_whose_record_came_earlier_stays_a_record() -> None:
    assert joined(["\tat a", "\tat b"]) == ["\tat a\n\tat b"]
    assert joined(["ERROR a", "\tat b"], "ab") == ["ERROR a", "\tat b"]


def test_the_blank_behind_the_tag_of_syslog_joins_nothing() -> None:
    lines = [" order 1", " order 2", "order 3", " order 4"]
    assert joined(lines[:2]) == lines[:2]
    # Without a blank at its head, a record may go on.
    assert joined(lines) == [" order 1", " order 2", "order 3\n order 4"]
    for trace in (JAVA, PYTHON[:5]):
        shifted = [f" {text}" for text in trace]
        assert joined([" INFO a", *shifted, " INFO b"]) == [" INFO a", "\n".join(shifted), " INFO b"]


def test_records_without_a_text_take_no_part() -> None:
    assert joined(["ERROR a", None, "\tat b"]) == ["ERROR a\n\tat b", None]


def test_a_record_is_bounded_in_lines_and_in_bytes() -> None:
    texts = joined(["ERROR a", *["\tat b"] * (2 * MAX_LINES)])
    assert [(text or "").count("\n") + 1 for text in texts] == [MAX_LINES, MAX_LINES, 1]
    wide = joined(["ERROR a", *["\t" + "é" * 10_000] * 9])
    assert len(wide) > 1
    assert all(len((text or "").encode()) <= MAX_BYTES for text in wide)


def test_streams_are_not_looked_at_unless_a_text_may_continue() -> None:
    assert continuations(["INFO a", "Total 7", "Done"], {}.__getitem__) == {}
