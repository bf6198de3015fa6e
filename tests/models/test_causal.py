"""Scoring lines together gives what reading each line by itself gives."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models import causal
from pipeline.models.causal import CausalNetwork, piece_surprisals
from pipeline.models.config import ModelConfig
from pipeline.models.lexicon import EncodedLines, Lexicon
from pipeline.models.tokenizer import CLS_ID, LineTokenizer

CPU = torch.device("cpu")
TOKENS = ("<IP>", "<NUM>")
LINES = [
    "connection from <IP> closed",
    "connection from <IP> closed by peer",
    "connection from <IP> opened",
    "connection",
    "request <NUM> served in <NUM> ms",
    "request <NUM> served in <NUM> ms, slow",
    "worker <NUM> started",
]
HOSTILE = [
    "",
    " ",
    "x",
    "!",
    "?!.,;--- ((()))",
    "<IP>",
    "<IP><NUM> <IP>",
    "core.<NUM>x<IP>y from<IP>",
    "[PAD] [CLS] [MASK]",
    "connection \x00\x01\x7f\x80",
    "lone \ud800 half\udfff",
    "long " * 500,
    "a1B" * 900,
    "connection from " * 200 + "the end",
    "日本語 ошибка é",
]


@pytest.fixture(scope="module")
def lexicon() -> Lexicon:
    return Lexicon(LineTokenizer.train(LINES, tokens=TOKENS, vocab_size=700, max_tokens=64))


@pytest.fixture(scope="module", params=[1, 2], ids="layers={}".format)
def network(request: pytest.FixtureRequest, lexicon: Lexicon) -> CausalNetwork:
    """Untrained, with weights so large that a wrong neighbour would show."""
    torch.set_num_threads(1)
    config = ModelConfig(hidden=32, heads=2, feed_forward=48, layers=request.param, max_tokens=64)
    torch.manual_seed(request.param)
    made = CausalNetwork(config, lexicon.tokenizer.vocab_size).eval()
    with torch.no_grad():
        for weights in made.parameters():
            weights.copy_(torch.randn_like(weights) * 0.3)
    return made


def read_alone(network: CausalNetwork, lines: EncodedLines) -> npt.NDArray[np.float32]:
    """Nats of every scored piece, each line by the plain forward that training uses."""
    out = np.zeros(len(lines.ids), dtype=np.float32)
    with torch.inference_mode():
        for begin, end in zip(lines.start[:-1].tolist(), lines.start[1:].tolist(), strict=True):
            if begin == end:
                continue
            truth = torch.from_numpy(lines.ids[begin:end])
            ids = torch.cat([torch.tensor([CLS_ID]), truth[:-1]])[None]
            logits = network(ids)[0] @ network.token_embedding.weight.T + network.bias  # (T, V)
            nats = (-logits.gather(1, truth[:, None])[:, 0]).clamp_min(0.0).numpy()
            out[begin:end] = np.where(lines.scored[begin:end], nats, 0.0)
    return out


def assert_equal(network: CausalNetwork, lines: EncodedLines) -> None:
    np.testing.assert_allclose(piece_surprisals(network, lines, CPU), read_alone(network, lines), atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("room", [1, 16, 100, 4096])
def test_lines_that_begin_alike_are_as_surprising_as_each_by_itself(
    network: CausalNetwork, lexicon: Lexicon, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setitem(causal._BATCH_TOKENS, "cpu", room)
    lines = lexicon.encode([*HOSTILE, *LINES, *LINES[::-1], *HOSTILE])
    assert piece_surprisals(network, lines, CPU).max() > 1.0
    assert_equal(network, lines)


words = st.sampled_from(["connection", "from", "<IP>", "<NUM>", "x", ".", "x.<NUM>", "é"])


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.lists(words, max_size=9).map(" ".join), max_size=12))
def test_any_lines_are_as_surprising_together_as_each_by_itself(
    network: CausalNetwork, lexicon: Lexicon, texts: Sequence[str]
) -> None:
    assert_equal(network, lexicon.encode(texts))


def test_lines_of_masks_alone_ask_for_nothing(network: CausalNetwork, lexicon: Lexicon) -> None:
    lines = lexicon.encode(["<IP>", "<IP> <NUM>", "<NUM>"])
    assert piece_surprisals(network, lines, CPU).tolist() == [0.0] * 4
