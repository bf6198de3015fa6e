"""Labels of Loki as text."""

import pytest

from pipeline.sources.protocols.labels import parsed_labels


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("{}", {}),
        (' { a = "b" , c="d" } ', {"a": "b", "c": "d"}),
        ('{a="b",}', {"a": "b"}),
        (r'{path="C:\\logs\\a.log", said="\"}\", b=\""}', {"path": r"C:\logs\a.log", "said": '"}", b="'}),
        (r'{a="\t\n\x41\u00e9\U0001F600\101"}', {"a": "\t\n\x41\u00e9\U0001f600A"}),
        (r"{raw=`a\b`}", {"raw": r"a\b"}),
        (r'{a="\ud800\xff\U00110000"}', {"a": "\ufffd\ufffd\ufffd"}),
    ],
)
def test_quotes_and_escapes_are_those_of_go(text: str, labels: dict[str, str]) -> None:
    assert parsed_labels(text) == labels


@pytest.mark.parametrize("text", ["", "a", "{", '{a="b"', '{a="b" c="d"}', '{a=b}', '{a="b"}x', '{1="b"}', '{a="b', '{="b"}'])  # fmt: skip
def test_a_text_that_is_no_set_of_labels_is_none(text: str) -> None:
    assert parsed_labels(text) is None
    assert parsed_labels('{a="' + "x" * 100_000 + '"}') is None
