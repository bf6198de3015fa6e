"""The byte-pair tokenizer of masked lines."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import BadBundle
from pipeline.models.lexicon import Lexicon
from pipeline.models.tokenizer import LineTokenizer

TOKENS = ("<IP>", "<NUM>")
LINES = ["connection from <IP> closed", "generating core.<NUM>", "NullPointerException in OrderService"]


@pytest.fixture(scope="module")
def tokenizer() -> LineTokenizer:
    return LineTokenizer.train(LINES, tokens=TOKENS, vocab_size=1024, max_tokens=32)


def test_a_mask_token_is_one_id_that_may_not_be_scored_even_inside_a_word(tokenizer: LineTokenizer) -> None:
    (ids,) = tokenizer.pieces(["core.<NUM><IP>x"])
    assert len([i for i in ids if i in tokenizer.fixed]) == 2 and len(ids) > 3


def test_no_merge_is_learnt_from_inside_a_mask_token(tokenizer: LineTokenizer) -> None:
    plain = LineTokenizer.train(["a <SECRETNAME> b"], tokens=("<SECRETNAME>",), vocab_size=400, max_tokens=32)
    assert "SECRET" not in plain.to_json().replace("<SECRETNAME>", "")


def test_the_text_of_a_special_token_in_a_line_is_ordinary_text(tokenizer: LineTokenizer) -> None:
    found = tokenizer.pieces(["look:", "[MASK]", "[PAD]", "[CLS]"])
    assert not {*tokenizer.specials} & {piece for ids in found for piece in ids}


def test_a_camel_case_name_is_cut_at_its_capitals(tokenizer: LineTokenizer) -> None:
    (ids,) = tokenizer.pieces(["NullPointerException"])
    assert len(ids) == 3


def test_of_two_mask_tokens_that_begin_alike_the_longer_one_is_found() -> None:
    made = LineTokenizer.train(LINES, tokens=("<A>", "<A><B>"), vocab_size=400, max_tokens=32)
    words = ["x<A><B>", "<A><A><B><A>"]
    long, short = (made.pieces([word])[0] for word in ("<A><B>", "<A>"))
    assert made.pieces(words)[1] == [*short, *long, *short]


def test_half_of_a_surrogate_pair_is_text_like_any_other(tokenizer: LineTokenizer) -> None:
    (ids,) = tokenizer.pieces(["a\ud800b"])
    assert len(ids) >= 3 and max(ids) < tokenizer.vocab_size


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=600), max_size=4))
def test_any_text_becomes_a_bounded_line_of_known_ids(lines: list[str]) -> None:
    made = LineTokenizer.train(LINES, tokens=TOKENS, vocab_size=600, max_tokens=32)
    found = Lexicon(made).encode(lines)
    assert all(0 <= i < made.vocab_size for i in found.ids.tolist())
    assert len(found.start) == len(lines) + 1
    assert all(b - a <= 30 for a, b in pairwise(found.start.tolist()))  # [CLS] and [SEP] come to it


def test_a_long_line_keeps_its_head_and_its_tail(tokenizer: LineTokenizer) -> None:
    found = Lexicon(tokenizer).encode(["first " + "middle " * 2000 + "last"])
    owners = [found.words[at] for at in found.place.tolist()]
    assert len(found.ids) == 30
    assert owners[0] == "first" and owners[-1] == "last"


def test_a_saved_tokenizer_gives_the_same_ids(tokenizer: LineTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    loaded = LineTokenizer.from_file(path, tokens=TOKENS, max_tokens=32)
    probe = ["connection", "from", "<IP>", "[MASK]", "refused", "é", "日本"]
    assert loaded.pieces(probe) == tokenizer.pieces(probe)


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
