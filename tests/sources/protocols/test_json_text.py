"""JSON of requests: faults that are mended, and the envelope around a line."""

import json

import msgspec
import pytest

from pipeline.sources.protocols.contract import Undecodable
from pipeline.sources.protocols.json_text import envelope, json_of, mend, read_body

ANY = msgspec.json.Decoder(str)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (rb'"a\ud800b"', "a\ufffdb"),
        (rb'"\udc00\ud800"', "\ufffd\ufffd"),
        (rb'"\ud800\ud83d\ude00\udc00"', "\ufffd\U0001f600\ufffd"),
        (rb'"\\ud800 \\\ud800 \n\uD800"', "\\ud800 \\\ufffd \n\ufffd"),
        (rb'"\\ud83d\ude00"', "\\ud83d\ufffd"),
        (b'"caf\xe9"', "caf\ufffd"),
        (b'\xef\xbb\xbf"a"', "a"),
        (b'"\\\\\\\\"', "\\\\"),
    ],
)
def test_half_surrogate_pairs_and_bytes_that_are_not_utf_8_are_replaced(body: bytes, text: str) -> None:
    assert read_body(ANY, body, "the body") == text


def test_what_is_whole_is_not_mended() -> None:
    assert mend(rb'"\\ud800 \ud83d\ude00"') is None
    assert mend('"\ufffd"') is None


@pytest.mark.parametrize("body", [b"", b'"a', b"7", b'"\\x"', b'"\\ud800', b"NaN"])
def test_every_other_fault_is_one_sentence(body: bytes) -> None:
    with pytest.raises(Undecodable, match=r"^the body is not readable: "):
        read_body(ANY, body, "the body")


def test_integers_of_any_size_are_written() -> None:
    assert (
        json_of({"a": 10**30, "b": "\u00e9", "c": [1.5, None]})
        == '{"a":' + "1" + "0" * 30 + ',"b":"\u00e9","c":[1.5,null]}'
    )
    assert json_of({"a": 1.5, "b": float("nan")}) == '{"a":1.5,"b":null}'


def test_an_envelope_hides_no_field_and_has_what_tells_its_form() -> None:
    assert json.loads(envelope("a", {"k": 1, "log": 2, "date": 3}, 1_500_000)) == {
        "date": 1.5, "log": "a", "k": 1, "metadata.log": 2, "metadata.date": 3,
    }  # fmt: skip
    assert json.loads(envelope("a", {"k": 1}, None)) == {"stream": "stdout", "log": "a", "k": 1}
    assert json.loads(envelope("a", {"stream": "stderr"}, None)) == {"log": "a", "stream": "stderr"}
