"""How foreign the letters, the words and the pairs of words of a line are."""

import re
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadBundle
from pipeline.models import novelty
from pipeline.models.novelty import Novelty

KNOWN = ["connection from <IP> accepted", "queue drained in <NUM> ms"]
MADE = Novelty.fit(KNOWN, [5, 1])


def test_a_line_of_the_training_has_no_foreign_gram_and_one_of_other_letters_only_such() -> None:
    assert MADE.score([*KNOWN, "xyzzy"]) == [0.0, 0.0, 1.0]


def test_familiar_words_in_a_new_order_are_less_novel_than_foreign_words() -> None:
    mixed, foreign = MADE.score(["queue accepted connection", "kernel panic on core"])
    assert 0.0 < mixed < 0.6 and foreign > 0.8


def test_a_word_of_familiar_trigrams_is_foreign_and_so_is_a_pair_of_familiar_words() -> None:
    assert Novelty.fit(["abc", "caba"], [1, 1]).score(["aba"]) == [
        0.5
    ]  # no trigram, the word; no pair is there
    made = Novelty.fit(["reset node", "set lane"], [1, 1])
    assert made.score(["reset lane"]) == [0.5]  # the pair alone, which weighs as much as both others


def test_compound_names_are_split_into_words_without_case() -> None:
    made = Novelty.fit(["reset Node"], [1])
    assert made.score(["resetNode"]) == [pytest.approx(2 / 9 / 4, abs=1e-4)]  # two trigrams
    assert made.score(["reset node"]) == [pytest.approx((3 / 10 + 2) / 4, abs=1e-4)]  # the pair has case


@pytest.mark.parametrize("line", ["", " ", "<IP>", "<IP><NUM> <IP>", "\x01", "\x02"])
def test_a_line_without_text_is_never_novel(line: str) -> None:
    assert MADE.score([line]) == [0.0]
    assert Novelty.fit([line], [1]).score([line]) == [0.0]


def test_one_mask_is_like_another_and_none_reaches_into_the_next_line() -> None:
    made = Novelty.fit(["ab<IP>cd"], [1])
    assert made.score(["ab<NUM>cd"]) == [0.0]
    assert made.score(["ab cd"])[0] > 0.0
    alone = MADE.score(["panic"])
    assert MADE.score(["panic", "queue drained in <NUM> ms"]) == [*alone, 0.0]


def test_what_masks_leave_counts_as_it_stands() -> None:
    made = Novelty.fit(['"GET <PATH>" 200'], [1])
    same, status, case = made.score(['"GET <PATH>" 200', '"GET <PATH>" 502', '"get <PATH>" 200'])
    assert same == 0.0 < status and case > 0.0


@given(st.lists(st.text(max_size=60), max_size=6))
def test_any_text_has_a_share_and_the_same_one_beside_any_other(lines: list[str]) -> None:
    together = MADE.score(lines)
    assert together == [MADE.score([line])[0] for line in lines]
    assert all(0.0 <= share <= 1.0 for share in together)
    assert max(Novelty.fit(lines, [1] * len(lines)).score(lines), default=0.0) == 0.0


WORD = re.compile("\x02|[A-Z]?[a-zé]+|[A-Z]+(?![a-zé])")


def grams(line: str) -> tuple[set[str], set[str], set[tuple[str, str]]]:
    """Trigrams, words and pairs of words of a line, by plain strings."""
    text = re.sub("<[A-Z0-9_*]+>", "\x02", f" {line} ")
    trigrams = {text[i : i + 3] for i in range(len(text) - 2)}
    words = WORD.findall(text)
    return (
        {gram for gram in trigrams if not set(gram) <= {" ", "\x02"}},
        {word.translate({ord(c): c.lower() for c in "ABCIP"}) for word in words if word != "\x02"},
        {pair for pair in pairwise(words) if pair != ("\x02", "\x02")},
    )


@given(st.lists(st.text(alphabet="abcé ABC1<>IP", max_size=12), max_size=6))
def test_the_share_is_that_of_the_different_grams_of_each_kind_of_a_line(lines: list[str]) -> None:
    known = ["abc cab", "b<IP>c", "aBc CAb <IP> 1"]
    held = [set[Any]().union(*kind) for kind in zip(*map(grams, known), strict=True)]

    def share(line: str) -> float:
        shares = [
            (weight * len(own - all_known) / len(own), weight)
            for own, all_known, weight in zip(grams(line), held, (1, 1, 2), strict=True)
            if own
        ]
        return sum(part for part, _ in shares) / max(sum(weight for _, weight in shares), 1)

    expected = [share(line) for line in lines]
    assert Novelty.fit(known, [1, 1, 1]).score(lines) == pytest.approx(expected, abs=1e-4)


def test_past_the_limit_the_grams_of_rare_lines_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(novelty, "_GRAMS_MOST", 25)
    made = Novelty.fit(["seldom seen line of letters", "the usual line"], [1, 1000])
    assert len(made) <= 25
    usual, rare = made.score(["the usual line", "seldom seen line of letters"])
    assert usual == 0.0 < rare


def test_it_survives_its_bytes() -> None:
    lines = [*KNOWN, "half \ud800 of é", "something else"]
    made = Novelty.fit(lines[:-1], [1, 1, 1])
    back = Novelty.from_bytes(made.to_bytes())
    assert back.score(lines) == made.score(lines) and back.to_bytes() == made.to_bytes()


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xc1",
        msgpack.packb([2, ["abc"]]),
        msgpack.packb([3, 7]),
        msgpack.packb([3, ["abc", 7]]),
        msgpack.packb([3]),
    ],
    ids=repr,
)
def test_bytes_that_are_no_grams_are_a_bad_bundle(blob: bytes) -> None:
    with pytest.raises(BadBundle, match="train again"):
        Novelty.from_bytes(blob)
