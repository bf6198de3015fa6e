"""Lines as arrays: slices that fit a room, and rectangles of lines of similar length."""

import numpy as np
import pytest

from pipeline.models import lexicon
from pipeline.models.lexicon import Lexicon, rectangles
from pipeline.models.tokenizer import LineTokenizer

LINES = ["one", "", "one two three", "two " * 40, "one two", "three " * 7]
ROOM = 2048  # places


@pytest.mark.parametrize("room", [1, 5, 12, 1000])
def test_batches_are_all_lines_in_order_and_fit_the_room(room: int) -> None:
    lines = Lexicon(LineTokenizer.train(LINES, tokens=("<IP>",), vocab_size=300, max_tokens=64)).encode(LINES)
    batches = list(lines.batches(room))
    assert np.concatenate([lines.ids[at] for at, _ in batches]).tolist() == lines.ids.tolist()
    assert np.concatenate([np.diff(start) for _, start in batches]).tolist() == np.diff(lines.start).tolist()
    assert all(start[0] == 0 and start[-1] == at.stop - at.start for at, start in batches)
    assert all(start[-1] <= room or len(start) == 2 for _, start in batches)


def test_rectangles_hold_each_place_once_and_little_else() -> None:
    lengths = np.random.default_rng(1).integers(0, 127, 3000)
    start = np.append(0, np.cumsum(lengths))
    found = list(rectangles(start, ROOM))
    held = np.concatenate([at[known] for at, known in found])
    assert sorted(held.tolist()) == list(range(start[-1]))
    for at, known in found:
        width = known.sum(1).max()  # before it is made a multiple of the lanes
        assert width <= at.shape[1] < width + lexicon._LANES // 2
        assert (~known[:, :width]).sum() <= ROOM // lexicon._PADDING
        assert at[:, :width].size <= ROOM
        assert (np.diff(at, axis=1)[known[:, 1:]] == 1).all()
