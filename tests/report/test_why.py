"""Why a finding is one, in one plain sentence, and the words that are marked in its lines."""

from dataclasses import replace

import pytest

from pipeline.report.text import MARKED, meaningful, sample_text
from pipeline.report.why import explain, why
from tests.report.test_findings import finding


def sentence(*reasons: str, message: str = "", level: str | None = "error") -> str:
    sample = replace(finding(1).samples[0], message=message, raw=message)
    return why(finding(1, reasons=reasons, samples=(sample,), level=level))


@pytest.mark.parametrize(
    ("reasons", "says"),
    [
        (("error-severity:error", "rare:1/3014"), "Seen once in 3,014 lines, and logged as error"),
        (("error-severity:killed", "new-template"), "Never seen before, and says “killed”"),
        (("new-template", "unlikely-tokens:odd words"), "Never seen before"),
        (("rare:7/900",), "Seen 7 times in 900 lines"),
        (("unlikely-tokens:signal",), "“signal” was unexpected after “by”"),
        (("unlikely-tokens:absent elsewhere",), "“absent”, “elsewhere” were unexpected"),
        (("unlikely-tokens:the of (<NUM>:x",), "Its words do not belong together"),
        (("unlikely-tokens:the of", "rare:2/90"), "Seen 2 times in 90 lines"),
        (
            ("error-severity:failed", "unlikely-tokens:signal", "rare:2/90"),
            "Seen 2 times in 90 lines, says “failed”, and “signal” was unexpected after “by”",
        ),
        ((), "The model finds it unlikely"),
    ],
)
def test_the_reason_is_one_plain_sentence(reasons: tuple[str, ...], says: str) -> None:
    assert sentence(*reasons, message="process 12 was terminated by signal 9") == says


def test_marks_are_whole_words_that_carry_meaning() -> None:
    words = [
        "the",
        "(<NUM>:certificate",
        "<NUM>",
        ",",
        "while",
        '"shop.example",',
        "expired)",
        "SSL",
        "handshake",
    ]
    assert meaningful(words) == ["shop.example", "expired", "SSL"]
    assert meaningful(["502", "a", "x" * 300, "-"]) == ["502"]
    assert len(meaningful(map(str, range(10, 90)))) == MARKED


def test_a_line_has_three_marks_at_most() -> None:
    sample = replace(finding(1).samples[0], message="odd odd odd odd", raw="odd odd odd odd", words=("odd",))
    assert sample_text(sample, 100)[1] == [(0, 3), (4, 7), (8, 11)]


def test_nothing_in_a_reason_is_obeyed() -> None:
    (part,) = explain(["unlikely-tokens:odd\x1b[2J"], "info", "an odd\x1b[2J line")
    assert "\x1b" not in part
