"""Lines as arrays: rectangles of lines of similar length."""

import numpy as np
import pytest

from pipeline.models import lexicon
from pipeline.models.lexicon import Lexicon
from pipeline.models.tokenizer import LineTokenizer

TOKENIZER = LineTokenizer.train(["one two three"], tokens=("<IP>",), vocab_size=300, max_tokens=64)


@pytest.mark.parametrize("room", [1, 100, 2048])
def test_rectangles_hold_each_piece_once_and_fit_their_room(room: int) -> None:
    texts = [f"{'one two ' * int(n)}" for n in np.random.default_rng(1).integers(0, 40, 300)]
    lines = Lexicon(TOKENIZER).encode(texts)
    held = []
    for places, real in lines.rectangles(room):
        assert places.size <= 1.4 * room + 64 or len(places) == 1  # a width is a multiple of the lanes
        assert real.any(axis=1).all() and (np.diff(places, axis=1)[real[:, 1:]] == 1).all()
        held += places[real].tolist()
    assert sorted(held) == list(range(len(lines.ids)))


def test_a_full_cache_of_words_begins_again_and_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexicon, "_WORDS_MOST", 2)
    small, asked = Lexicon(TOKENIZER, len), Lexicon(TOKENIZER, len)
    for text in ("one two three", "four five", "one", "six <IP> seven"):
        first, second = small.encode([text]), small.encode([text])
        assert first.ids.tolist() == second.ids.tolist() == asked.encode([text]).ids.tolist()
        assert first.flags.tolist() == [len(word) for word in text.split()]
