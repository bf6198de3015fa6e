"""Requests that no honest sender writes are decoded to records that can be accepted, or are Undecodable."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._fuzz_mutations import mutations
from bench._fuzz_requests import REQUESTS, checked
from bench._fuzz_seeds import REQUEST_WORDS
from pipeline.sources.protocols.contract import Undecodable

NAMES = sorted(REQUESTS)


def is_answered(name: str, body: bytes) -> bool:
    """Whether the body was decoded; False where it was refused."""
    requests = REQUESTS[name]
    try:
        checked(requests.decode(body, requests.hints))
    except Undecodable as exc:
        assert str(exc)
        assert "\n" not in str(exc)
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_what_an_honest_sender_writes_is_decoded_and_each_part_of_it_is_answered(name: str) -> None:
    for body in REQUESTS[name].seeds:
        assert is_answered(name, body)
        for end in range(0, len(body), max(1, len(body) // 64)):
            is_answered(name, body[:end])


@pytest.mark.parametrize("name", NAMES)
@given(body=st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_answered(name: str, body: bytes) -> None:
    is_answered(name, body)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_every_change_of_an_honest_request_is_answered(name: str, seed: int) -> None:
    changed = mutations(REQUESTS[name].seeds, REQUEST_WORDS, seed)
    for _ in range(len(REQUESTS[name].seeds)):
        next(changed)
    for _ in range(5):
        is_answered(name, next(changed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "opening", [b"[", b'{"a":', b"{", b'[{"a":', b'{"event":{"a":', b'{"resourceLogs":[{"x":']
)
def test_a_hundred_thousand_levels_are_answered(name: str, opening: bytes) -> None:
    is_answered(name, opening * 100_000)
    is_answered(name, opening + b"[" * 100_000 + b"]" * 100_000)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_is_the_same_every_time(name: str) -> None:
    requests = REQUESTS[name]
    for body in requests.seeds:
        assert requests.decode(body, requests.hints) == requests.decode(body, requests.hints)


def test_columns_have_one_length_however_many_records_are_joined() -> None:
    rng = random.Random(7)
    lines = [
        b"ERROR a",
        b"\tat b",
        b"Traceback (most recent call last):",
        b"ValueError: 7",
        b"",
        b"Caused by: x",
    ]
    for _ in range(200):
        assert is_answered("text", b"\n".join(rng.choices(lines, k=12)))
        assert is_answered(
            "ndjson",
            b"\n".join(b'{"log":"%s"}' % line.replace(b"\t", b"\\t") for line in rng.choices(lines, k=12)),
        )
