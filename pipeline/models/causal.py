"""A small causal transformer over the pieces (subwords) of a line: how unlikely each is after its prefix.

One forward reads every piece of a line, and every piece is a target in training. The softmax is
self-normalised (Devlin et al., ACL 2014): training pulls log Z towards 0, so that scoring needs only the
logit of the target piece. The output bias begins as the log frequency of each piece, so that no step is spent
on learning frequencies.

Scoring shares prefixes, since a causal network never looks ahead:

    line 0   [CLS]@0 send@1 packet@2    targets: send, packet, to
    line 1   [CLS]@0 send@1 packet@2    targets: now               the others follow prefixes of line 0
    line 2   [CLS]@0 drop@1 packet@2    targets: drop, packet, to  another prefix, scored too
    inputs   U = 6 distinct (piece, column) pairs: embedding, ln_1 and qkv of the first block run once each
    rows     [[0 1 3] [0 1 3] [0 2 3]]: (B, T) the input at each place. Attention gathers them line by line.
    scored   K = 7 of 9 places: proj, mlp and the output layer of the last block run on these only.
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
from pipeline.models.fits.world import WHOLE
from pipeline.models.lexicon import Bools, EncodedLines, Ints, rectangles
from pipeline.models.tokenizer import CLS_ID, PAD_ID

# Weight of (log Z)^2 in the loss; 0.03 and 0.1 cost nothing, and at 0.1 the logits are nearer to NLL.
_LOG_Z_WEIGHT: Final = 0.1
_INIT_STD: Final = 0.05  # near 1/sqrt(width)
# Ids per forward: bounds memory for any number of lines. Larger batches fall out of a core's cache.
_BATCH_TOKENS: Final = {"cpu": 1 << 13, "cuda": 1 << 17}
_RECTANGLES: Final = 4  # of a batch at least: attention over one of them fits a core's cache
_SPLITMIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))

# Packed lines of similar length: `rows` (B, T), the input at each place, and `scored` (K,), flat places row *
# T + column.
Packed = tuple[torch.Tensor, torch.Tensor]
Floats = npt.NDArray[np.float32]


class CausalNetwork(nn.Module):
    """(B, T) ids, rows beginning with [CLS] -> (B, T, D). Padding on the right is never attended to."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, config.hidden)
        self.position_embedding = nn.Embedding(config.max_tokens, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden)
        self.bias = nn.Parameter(torch.zeros(vocab_size))  # of the output, whose matrix is `token_embedding`
        self.dropout = config.dropout
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_INIT_STD)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        hidden = functional.dropout(hidden, self.dropout, self.training)
        for block in self.blocks:
            hidden = block(hidden)
        return cast("torch.Tensor", self.ln_f(hidden))

    def loss(self, ids: torch.Tensor, rows: slice = WHOLE) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss to minimise, NLL in nats per piece) of (B, T) lines from [CLS] to [SEP].

        Of `rows` alone they are the parts of these lines in the means over the whole batch.
        """
        all_real = ids[:, 1:] != PAD_ID
        ids, real = ids[rows], all_real[rows]
        if not len(ids):
            return ids.new_zeros((), dtype=torch.float32), ids.new_zeros((), dtype=torch.float32)
        hidden, targets = self(ids[:, :-1])[real], ids[:, 1:][real]  # (N, D), (N,)
        logits = functional.linear(hidden, self.token_embedding.weight, self.bias)  # (N, V)
        log_z = logits.logsumexp(1)
        share = real.sum() / all_real.sum()
        nll = share * (log_z - logits.gather(1, targets[:, None])[:, 0]).mean()
        return nll + share * _LOG_Z_WEIGHT * (log_z * log_z).mean(), nll

    def target_nll(
        self, inputs: torch.Tensor, packed: Sequence[Packed], targets: torch.Tensor
    ) -> torch.Tensor:
        """(K,) nats, at least 0, of the pieces `targets` (K,) at the asked places of all packed lines.

        `inputs` (2, U): distinct pieces and their columns.
        """
        hidden = self.token_embedding(inputs[0]) + self.position_embedding(inputs[1])  # (U, D)
        *blocks, last = cast("list[Block]", list(self.blocks))
        for block in blocks:
            hidden = block.on_packed(hidden, [(rows, _flat_places(rows)) for rows, _ in packed])
            # From here on each place has a vector of its own.
            ends = np.cumsum([rows.numel() for rows, _ in packed]).tolist()
            packed = [
                (end - rows.numel() + _flat_places(rows).view_as(rows), scored)
                for end, (rows, scored) in zip(ends, packed, strict=True)
            ]
        hidden = self.ln_f(last.on_packed(hidden, packed))  # (K, D)
        logits = (hidden * self.token_embedding(targets)).sum(-1) + self.bias[targets]
        return cast("torch.Tensor", (-logits).clamp_min(0.0))


class Block(nn.Module):
    """Pre-norm attention and MLP: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.ln_1 = nn.LayerNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.proj = nn.Linear(config.hidden, config.hidden)
        self.ln_2 = nn.LayerNorm(config.hidden)
        self.fc_in = nn.Linear(config.hidden, config.feed_forward)
        self.fc_out = nn.Linear(config.feed_forward, config.hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden, self.attention(self.qkv(self.ln_1(hidden))))

    def on_packed(self, hidden: torch.Tensor, packed: Sequence[Packed]) -> torch.Tensor:
        """(M, D) vectors of the inputs -> (K, D) at the asked places of lines packed from them.

        Only attention runs line by line.
        """
        qkv = self.qkv(self.ln_1(hidden))  # (M, 3 * D)
        attended = [
            self.attention(functional.embedding(rows, qkv)).flatten(0, 1).index_select(0, scored)
            for rows, scored in packed
        ]
        residual = torch.cat([rows.flatten().index_select(0, scored) for rows, scored in packed])
        return self.mlp(hidden.index_select(0, residual), torch.cat(attended))

    def attention(self, qkv: torch.Tensor) -> torch.Tensor:
        """(B, T, 3 * D) -> (B, T, D), before the projection."""
        rows, length, width = qkv.shape
        query, key, value = qkv.view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (B, H, T, D/H)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(rows, length, width // 3)

    def mlp(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream after the projection of attention and after the feed-forward layer."""
        hidden = hidden + functional.dropout(self.proj(attended), self.dropout, self.training)
        wide = functional.gelu(self.fc_in(self.ln_2(hidden)))
        return hidden + functional.dropout(self.fc_out(wide), self.dropout, self.training)


def set_bias(bias: torch.Tensor, frequency: npt.NDArray[np.float64]) -> None:
    """Sets an output bias to the log share of each piece (V,); an unseen piece counts as half of one."""
    share = np.log((frequency + 0.5) / (frequency + 0.5).sum())
    with torch.no_grad():
        bias.copy_(torch.from_numpy(share).float())


def piece_surprisals(network: CausalNetwork, lines: EncodedLines, device: torch.device) -> Floats:
    """Surprisal in nats of every scored piece, (N,) as in `lines.ids`; 0 for mask tokens."""
    out = np.zeros(len(lines.ids), dtype=np.float32)
    room = _BATCH_TOKENS.get(device.type, _BATCH_TOKENS["cpu"])
    with torch.inference_mode():
        for at, start in lines.batches(room):
            if lines.scored[at].any():
                packing = rectangles(start, room // _RECTANGLES)
                out[at] = _batch_surprisals(network, lines.ids[at], start, lines.scored[at], packing)
    return out


def _batch_surprisals(
    network: CausalNetwork, ids: Ints, start: Ints, scored: Bools, packing: Iterable[tuple[Ints, Bools]]
) -> Floats:
    """(N,) nats of the pieces `ids` (N,) of lines that begin at `start` (L + 1,), packed by `rectangles`."""
    column = np.arange(len(ids)) - np.repeat(start[:-1], np.diff(start))
    pairs, pair = np.unique(column << 32 | ids, return_inverse=True)
    # The input of a place is the piece before its target; [CLS] stands before the first one.
    inputs = np.stack([np.append(CLS_ID, pairs & 0xFFFFFFFF), np.append(0, (pairs >> 32) + 1)])
    input_of = np.where(column > 0, np.roll(pair + 1, 1), 0)
    where = np.flatnonzero(scored)
    _, first, owner = np.unique(
        _prefix_hashes(pairs, pair, start)[where], return_index=True, return_inverse=True
    )
    first_of_prefix = np.zeros(len(ids), dtype=np.bool_)
    first_of_prefix[where[first]] = True

    def on_device(array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(network.bias.device)

    packed: list[Packed] = []
    answered: list[Ints] = []
    for places, real in packing:
        chosen = np.flatnonzero(first_of_prefix[places] & real)
        packed.append((on_device(input_of[places]), on_device(chosen)))
        answered.append(places.ravel()[chosen])
    answers = np.concatenate(answered)
    nats = np.zeros(len(ids), dtype=np.float32)
    nats[answers] = network.target_nll(on_device(inputs), packed, on_device(ids[answers])).numpy(force=True)
    nats[where] = nats[where[first][owner]]
    return nats


def _prefix_hashes(pairs: Ints, pair: Ints, start: Ints) -> npt.NDArray[np.uint64]:
    """(N,) a hash of each line up to and including each place; equal for equal prefixes.

    `pair` (N,): which of the distinct (column, piece) `pairs` stands at each place. A prefix is a set of such
    pairs, so a sum of mixed numbers identifies it (splitmix64, Steele et al., OOPSLA 2014) unless 64 bits
    collide.
    """
    mixed = pairs.astype(np.uint64)
    for shift, factor in _SPLITMIX:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    sums = np.cumsum((mixed ^ (mixed >> np.uint64(31)))[pair])
    before = np.append(np.uint64(0), sums)[start[:-1]]
    hashes: npt.NDArray[np.uint64] = sums - np.repeat(before, np.diff(start))
    return hashes


def _flat_places(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows.numel(), device=rows.device)


def finite(network: Any) -> bool:
    """Whether every weight is a number."""
    return all(math.isfinite(float(p.detach().sum())) for p in network.parameters())
