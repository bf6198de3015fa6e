"""A small causal transformer over the pieces of a line: how unlikely each piece is after those before it.

One forward reads every piece of a line, where masking costs one per group of words, and every piece is a target in
training, so the network learns faster per step. The softmax is self-normalised (Devlin et al., ACL 2014): training
pulls log Z towards 0, so that scoring needs the logit of the piece that stands there and no other. The output bias
begins as the log frequency of each piece, so no step is spent on learning which pieces are common.

As nothing looks ahead, lines that begin alike are alike as far as they do. Scoring asks for what follows a beginning
once, and only where a word stands that is scored. Before attention, a piece in a column is the same in every line, so
each such pair goes through the first layers once.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from pipeline.models.config import ModelConfig
from pipeline.models.lexicon import Bools, EncodedLines, Ints, rectangles
from pipeline.models.tokenizer import CLS_ID, PAD_ID

# Of (log Z)^2 in the loss; 0.03 and 0.1 cost nothing measurable, and at 0.1 the logits are nearer to NLL.
_NORMALISED: Final = 0.1
_SPREAD: Final = 0.05  # of the initial weights: near 1/sqrt(width)
# Ids per forward, bounding memory whatever the number of lines. Larger batches fall out of a core's cache.
_BATCH_TOKENS: Final = {"cpu": 1 << 13, "cuda": 1 << 17}

_GRIDS: Final = 4  # of a batch at least: what attention needs of one fits a core's cache
_MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))

# EncodedLines of similar length: (B, T) which row of what is read stands at each place, and (K,) the places that are asked,
# row * T + column.
Grid = tuple[torch.Tensor, torch.Tensor]
Floats = npt.NDArray[np.float32]


class CausalNetwork(nn.Module):
    """(B, T) ids, each row beginning with [CLS] -> (B, T, D). Padding stands on the right, where nothing looks."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.pieces = nn.Embedding(vocab_size, config.hidden)
        self.places = nn.Embedding(config.max_tokens, config.hidden)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.bias = nn.Parameter(torch.zeros(vocab_size))  # of the output, whose matrix is `pieces`
        self.dropout = config.dropout
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=_SPREAD)
                nn.init.zeros_(part.bias)
            elif isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=_SPREAD)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.pieces(ids) + self.places.weight[: ids.shape[1]]
        hidden = functional.dropout(hidden, self.dropout, self.training)
        for block in self.blocks:
            hidden = block(hidden)
        found: torch.Tensor = self.norm(hidden)
        return found

    def loss(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what to minimise, NLL in nats per piece) of (B, T) lines from [CLS] to [SEP]."""
        truth = ids[:, 1:]
        where = truth != PAD_ID
        hidden, truth = self(ids[:, :-1])[where], truth[where]  # (N, D), (N,)
        logits = functional.linear(hidden, self.pieces.weight, self.bias)  # (N, V)
        log_z = logits.logsumexp(1)
        nll = (log_z - logits.gather(1, truth[:, None])[:, 0]).mean()
        return nll + _NORMALISED * (log_z * log_z).mean(), nll

    def surprisal(self, inputs: torch.Tensor, grids: Sequence[Grid], truth: torch.Tensor) -> torch.Tensor:
        """(K,) nats, at least 0, of the pieces `truth` (K,) at the asked places of all grids.

        `inputs` (2, U): different pieces and the columns that they stand in.
        """
        hidden = self.pieces(inputs[0]) + self.places(inputs[1])  # (U, D)
        *blocks, last = cast("list[_Block]", list(self.blocks))
        for block in blocks:
            hidden = block.at(hidden, [(rows, _every(rows)) for rows, _ in grids])
            ends = np.cumsum([rows.numel() for rows, _ in grids]).tolist()
            grids = [
                (end - rows.numel() + _every(rows).view_as(rows), asked)
                for end, (rows, asked) in zip(ends, grids, strict=True)
            ]
        hidden = self.norm(last.at(hidden, grids))  # (K, D)
        logits = (hidden * self.pieces(truth)).sum(-1) + self.bias[truth]
        found: torch.Tensor = (-logits).clamp_min(0.0)
        return found


class _Block(nn.Module):
    """Attention and a feed-forward layer, the layer norm before each: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.before = nn.LayerNorm(config.hidden)
        self.all = nn.Linear(config.hidden, 3 * config.hidden)
        self.mix = nn.Linear(config.hidden, config.hidden)
        self.between = nn.LayerNorm(config.hidden)
        self.widen = nn.Linear(config.hidden, config.feed_forward)
        self.narrow = nn.Linear(config.feed_forward, config.hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._think(hidden, self._look_back(self.all(self.before(hidden))))

    def at(self, hidden: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """(M, D) -> (K, D): what the whole gives at the asked places of grids that are made of rows of `hidden`.

        Only attention is done line by line.
        """
        split = self.all(self.before(hidden))  # (M, 3 * D)
        seen = [
            self._look_back(functional.embedding(rows, split)).flatten(0, 1).index_select(0, asked)
            for rows, asked in grids
        ]
        stands = torch.cat([rows.flatten().index_select(0, asked) for rows, asked in grids])
        return self._think(hidden.index_select(0, stands), torch.cat(seen))

    def _look_back(self, split: torch.Tensor) -> torch.Tensor:
        """(B, T, 3 * D), queries, keys and values -> (B, T, D)."""
        rows, length, width = split.shape
        parts = split.view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts  # (B, H, T, D/H) each
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return seen.transpose(1, 2).reshape(rows, length, width // 3)

    def _think(self, hidden: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        hidden = hidden + functional.dropout(self.mix(seen), self.dropout, self.training)
        wide = functional.gelu(self.widen(self.between(hidden)))
        return hidden + functional.dropout(self.narrow(wide), self.dropout, self.training)


def begin_with(network: CausalNetwork, frequency: npt.NDArray[np.float64]) -> None:
    """Set the output bias to the log share of each piece (V,), half an occurrence for one never seen."""
    share = np.log((frequency + 0.5) / (frequency + 0.5).sum())
    with torch.no_grad():
        network.bias.copy_(torch.from_numpy(share).float())


def piece_surprisals(network: CausalNetwork, lines: EncodedLines, device: torch.device) -> Floats:
    """Nats of every scored piece, (N,) as in `lines.ids`; 0 for mask tokens."""
    out = np.zeros(len(lines.ids), dtype=np.float32)
    room = _BATCH_TOKENS.get(device.type, _BATCH_TOKENS["cpu"])
    with torch.inference_mode():
        for at, start in lines.batches(room):
            if lines.scored[at].any():
                grids = rectangles(start, room // _GRIDS)
                out[at] = _surprisals(network, lines.ids[at], start, lines.scored[at], grids)
    return out


def _surprisals(
    network: CausalNetwork,
    ids: Ints,
    start: Ints,
    scored: Bools,
    together: Iterable[tuple[Ints, Bools]],
) -> Floats:
    """(N,) of the pieces `ids` (N,) of lines that begin at `start` (L + 1,); `together`: their `rectangles`."""
    column = np.arange(len(ids)) - np.repeat(start[:-1], np.diff(start))
    pairs, pair = np.unique(column << 32 | ids, return_inverse=True)
    # A piece is read where the next one is asked for; in front of the first one stands [CLS].
    inputs = np.stack([np.append(CLS_ID, pairs & 0xFFFFFFFF), np.append(0, (pairs >> 32) + 1)])
    read = np.where(column > 0, np.roll(pair + 1, 1), 0)
    where = np.flatnonzero(scored)
    _, first, owner = np.unique(
        _beginnings(pairs, pair, start)[where], return_index=True, return_inverse=True
    )
    asked = np.zeros(len(ids), dtype=np.bool_)
    asked[where[first]] = True

    def given(array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(network.bias.device)

    grids: list[Grid] = []
    answered: list[Ints] = []
    for at, known in together:
        chosen = np.flatnonzero(asked[at] & known)
        grids.append((given(read[at]), given(chosen)))
        answered.append(at.ravel()[chosen])
    answers = np.concatenate(answered)
    nats = np.zeros(len(ids), dtype=np.float32)
    nats[answers] = network.surprisal(given(inputs), grids, given(ids[answers])).numpy(force=True)
    nats[where] = nats[where[first][owner]]
    return nats


def _beginnings(pairs: Ints, pair: Ints, start: Ints) -> npt.NDArray[np.uint64]:
    """(N,) the same number for two places exactly where their lines are the same up to there, if no 64 bits collide.

    `pair` (N,): which of the different (column, piece) `pairs` stands at each place.
    """
    mixed = pairs.astype(np.uint64)
    for shift, factor in _MIX:  # splitmix64 (Steele et al., OOPSLA 2014): a sum of its numbers has no pattern
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    sums = np.cumsum((mixed ^ (mixed >> np.uint64(31)))[pair])
    before = np.append(np.uint64(0), sums)[start[:-1]]
    found: npt.NDArray[np.uint64] = sums - np.repeat(before, np.diff(start))
    return found


def _every(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows.numel(), device=rows.device)


def finite(network: Any) -> bool:
    """Whether every weight is a number."""
    return all(math.isfinite(float(p.detach().sum())) for p in network.parameters())
