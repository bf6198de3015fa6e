"""The byte-pair tokenizer of masked lines."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import BadBundle
from pipeline.models import tokenizer as module
from pipeline.models.tokenizer import CLS_ID, MASK_ID, SEP_ID, LineTokenizer

TOKENS = ("<IP>", "<NUM>")
LINES = ["connection from <IP> closed", "generating core.<NUM>", "NullPointerException in OrderService"]


@pytest.fixture(scope="module")
def tokenizer() -> LineTokenizer:
    return LineTokenizer.train(LINES, tokens=TOKENS, vocab_size=1024, max_tokens=32)


def test_a_mask_token_is_one_id_that_may_not_be_scored_even_inside_a_word(tokenizer: LineTokenizer) -> None:
    line = tokenizer.encode(["core.<NUM><IP>x"])[0]
    blank = [i for i, p in zip(line.ids, line.piece, strict=True) if p < 0]
    assert len(blank) == 4  # [CLS], <NUM>, <IP>, [SEP]
    assert line.ids[0] == CLS_ID and line.ids[-1] == SEP_ID


def test_no_merge_is_learnt_from_inside_a_mask_token(tokenizer: LineTokenizer) -> None:
    plain = LineTokenizer.train(["a <SECRETNAME> b"], tokens=("<SECRETNAME>",), vocab_size=400, max_tokens=32)
    assert "SECRET" not in plain.to_json().replace("<SECRETNAME>", "")


def test_the_text_of_a_special_token_in_a_line_is_ordinary_text(tokenizer: LineTokenizer) -> None:
    assert MASK_ID not in tokenizer.encode(["look: [MASK] [PAD] [CLS]"])[0].ids


def test_every_scored_id_points_at_its_space_separated_word(tokenizer: LineTokenizer) -> None:
    line = tokenizer.encode(["connection from <IP> refused"])[0]
    owners = {line.words[w] for w in line.word if w >= 0}
    assert owners == {"connection", "from", "refused"}


def test_a_camel_case_name_is_cut_at_its_capitals(tokenizer: LineTokenizer) -> None:
    line = tokenizer.encode(["NullPointerException"])[0]
    assert len({p for p in line.piece if p >= 0}) == 3


def test_repeated_words_around_masks_have_pieces_of_their_own(tokenizer: LineTokenizer) -> None:
    line = tokenizer.encode(["core <NUM> core <NUM> core"])[0]
    assert len({p for p in line.piece if p >= 0}) == 3


def by_the_library(tokenizer: LineTokenizer, words: list[str]) -> list[list[int]]:
    spaced = [f" {word}" for word in words]
    return [e.ids for e in tokenizer._inner.encode_batch(spaced, add_special_tokens=False)]


PARTS = [
    "a",
    "B",
    "Order",
    "from",
    "7",
    ".",
    "é",
    "日",
    "\x00",
    "<",
    ">",
    "IP",
    "[MASK]",
    "<IP>",
    "<NUM>",
    "<NUM",
    "<ip>",
]


@given(st.lists(st.lists(st.sampled_from(PARTS), min_size=1, max_size=8).map("".join), max_size=8))
def test_the_pieces_of_words_are_those_of_the_library(tokenizer: LineTokenizer, words: list[str]) -> None:
    assert tokenizer.pieces(words) == by_the_library(tokenizer, words)


@given(st.text(max_size=80).map(str.split))
def test_the_pieces_of_any_text_are_those_of_the_library(tokenizer: LineTokenizer, words: list[str]) -> None:
    assert tokenizer.pieces(words) == by_the_library(tokenizer, words)


def test_of_two_mask_tokens_that_begin_alike_the_longer_one_is_found() -> None:
    made = LineTokenizer.train(LINES, tokens=("<A>", "<A><B>"), vocab_size=400, max_tokens=32)
    words = ["x<A><B>", "<A><A><B><A>"]
    assert made.pieces(words) == by_the_library(made, words)


def test_words_that_were_met_are_forgotten_in_time_and_blobs_at_once(
    tokenizer: LineTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CUTS_MOST", 8)
    words = [f"word{'x' * i}" for i in range(50)]
    assert tokenizer.pieces(words) == by_the_library(tokenizer, words)
    assert 0 < len(tokenizer._cuts) <= 8
    tokenizer.pieces(["y" * 4096])
    assert max(map(len, tokenizer._cuts)) <= 32


def test_half_of_a_surrogate_pair_is_text_like_any_other(tokenizer: LineTokenizer) -> None:
    (ids,) = tokenizer.pieces(["a\ud800b"])
    assert len(ids) >= 3 and max(ids) < tokenizer.vocab_size


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=600), max_size=4))
def test_any_text_becomes_a_bounded_line_of_known_ids(lines: list[str]) -> None:
    made = LineTokenizer.train(LINES, tokens=TOKENS, vocab_size=600, max_tokens=32)
    for line in made.encode(lines):
        assert 2 <= len(line.ids) <= 32
        assert all(0 <= i < made.vocab_size for i in line.ids)
        assert len(line.ids) == len(line.piece) == len(line.word)
        assert all(w < len(line.words) for w in line.word)


def test_a_long_line_keeps_its_head_and_its_tail(tokenizer: LineTokenizer) -> None:
    line = tokenizer.encode(["first " + "middle " * 2000 + "last"])[0]
    owners = [line.words[w] for w in line.word if w >= 0]
    assert len(line.ids) == 32
    assert owners[0] == "first" and owners[-1] == "last"


def test_a_saved_tokenizer_gives_the_same_ids(tokenizer: LineTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    loaded = LineTokenizer.from_file(path, tokens=TOKENS, max_tokens=32)
    probe = ["connection from <IP> [MASK] refused é 日本"]
    assert loaded.encode(probe) == tokenizer.encode(probe)


def test_training_twice_gives_the_same_tokenizer(tokenizer: LineTokenizer) -> None:
    again = LineTokenizer.train(LINES, tokens=TOKENS, vocab_size=1024, max_tokens=32)
    assert again.to_json() == tokenizer.to_json()


@pytest.mark.parametrize("text", ["{}", "not json", '{"version": "1.0", "model": {"type": "Nope"}}'])
def test_a_file_that_is_no_tokenizer_is_a_bad_bundle(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadBundle):
        LineTokenizer.from_file(path, tokens=TOKENS, max_tokens=32)


def test_a_tokenizer_without_a_mask_token_is_a_bad_bundle(tokenizer: LineTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    with pytest.raises(BadBundle, match="<UUID>"):
        LineTokenizer.from_file(path, tokens=("<UUID>",), max_tokens=32)


def test_a_tokenizer_that_cuts_words_in_another_way_is_a_bad_bundle(
    tokenizer: LineTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json().replace("[A-Z]?[a-z]+", "[a-z]+"), encoding="utf-8")
    with pytest.raises(BadBundle, match="cuts words"):
        LineTokenizer.from_file(path, tokens=TOKENS, max_tokens=32)
