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

A cache keeps inputs and the answers of prefixes from call to call, because a log repeats both.
"""

import math
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from pipeline.models.config import ModelConfig
from pipeline.models.fits.world import WHOLE
from pipeline.models.lexicon import Bools, EncodedLines, rectangles
from pipeline.models.tokenizer import CLS_ID, PAD_ID, Ints

# Weight of (log Z)^2 in the loss; 0.03 and 0.1 cost nothing, and at 0.1 the logits are nearer to NLL.
_LOG_Z_WEIGHT: Final = 0.1
_INIT_STD: Final = 0.05  # near 1/sqrt(width)
# Ids per forward: bounds memory for any number of lines. Larger batches fall out of a core's cache.
_BATCH_TOKENS: Final = {"cpu": 1 << 13, "cuda": 1 << 17}
_RECTANGLES: Final = 4  # of a batch at least: attention over one of them fits a core's cache
_PREFIX_BITS: Final = 18  # of the number of prefixes in a cache: 4 MiB
_INPUTS_BYTES: Final = {
    "cpu": 1 << 24,
    "cuda": 0,
}  # kept from call to call; a device's memory is the weights'
_SPLITMIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))

# Packed lines of similar length: `rows` (B, T), the input at each place, and `scored` (K,), flat places row *
# T + column.
Packed = tuple[torch.Tensor, torch.Tensor]
Floats = npt.NDArray[np.float32]
Hashes = npt.NDArray[np.uint64]
Inputs = tuple[torch.Tensor, torch.Tensor]  # vectors (U, D), and their queries, keys and values (U, 3 * D)


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

    def first_layers(self, pieces: torch.Tensor, columns: torch.Tensor) -> "Inputs":
        """Of U pieces in these columns."""
        hidden = self.token_embedding(pieces) + self.position_embedding(columns)
        return hidden, cast("Block", self.blocks[0]).queries(hidden)

    def target_nll(self, inputs: "Inputs", packed: Sequence[Packed], targets: torch.Tensor) -> torch.Tensor:
        """(K,) nats, at least 0, of the pieces `targets` (K,) at the asked places of all packed lines."""
        hidden, qkv = inputs
        blocks = cast("list[Block]", list(self.blocks))
        for block, following in pairwise(blocks):
            hidden = block.on_packed(hidden, qkv, [(rows, _flat_places(rows)) for rows, _ in packed])
            qkv = following.queries(hidden)
            # From here on each place has a vector of its own.
            ends = np.cumsum([rows.numel() for rows, _ in packed]).tolist()
            packed = [
                (end - rows.numel() + _flat_places(rows).view_as(rows), scored)
                for end, (rows, scored) in zip(ends, packed, strict=True)
            ]
        hidden = self.ln_f(blocks[-1].on_packed(hidden, qkv, packed))  # (K, D)
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
        return self.mlp(hidden, self.attention(self.queries(hidden)))

    def queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., 3 * D): query, key and value."""
        return cast("torch.Tensor", self.qkv(self.ln_1(hidden)))

    def on_packed(self, hidden: torch.Tensor, qkv: torch.Tensor, packed: Sequence[Packed]) -> torch.Tensor:
        """(M, D) vectors of inputs and their `queries` -> (K, D) at the asked places of lines packed of them.

        Only attention runs line by line.
        """
        attended = [
            self.attention(functional.embedding(rows, qkv)).flatten(0, 1).index_select(0, scored)
            for rows, scored in packed
        ]
        residual = torch.cat([rows.flatten().index_select(0, scored) for rows, scored in packed])
        return self._mlp_in_place(hidden.index_select(0, residual), torch.cat(attended))

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

    def _mlp_in_place(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """As `mlp` without a gradient, in the memory of `hidden`: a fifth less time than with new arrays."""
        hidden.add_(self.proj.bias).addmm_(attended, self.proj.weight.t())
        wide = torch.ops.aten.gelu_(self.fc_in(self.ln_2(hidden)))
        return hidden.add_(self.fc_out.bias).addmm_(wide, self.fc_out.weight.t())


def set_bias(bias: torch.Tensor, frequency: npt.NDArray[np.float64]) -> None:
    """Sets an output bias to the log share of each piece (V,); an unseen piece counts as half of one."""
    share = np.log((frequency + 0.5) / (frequency + 0.5).sum())
    with torch.no_grad():
        bias.copy_(torch.from_numpy(share).float())


class CausalCache:
    """What a network with fixed weights answered before. Thread-safe; a full cache forgets."""

    def __init__(self, network: CausalNetwork) -> None:
        self._network = network
        self._lock = threading.Lock()
        slots = 1 << _PREFIX_BITS
        # The upper bits of a hash are its slot. The hashes of an empty cache are of other slots.
        self._hashes = ~(np.arange(slots, dtype=np.uint64) << np.uint64(64 - _PREFIX_BITS))
        self._nats = np.zeros(slots, dtype=np.float32)
        self._first = np.zeros(slots, dtype=np.int32)
        self._vocab, width = map(int, network.token_embedding.weight.shape)
        room = _INPUTS_BYTES.get(network.bias.device.type, 0)
        self._most = room // (4 * width * network.bias.element_size())  # inputs
        self._count = 1
        self._forget_inputs(0)

    def nats(self, hashes: Hashes) -> tuple[Floats, Ints, Ints]:
        """Of prefixes (S,): nats (S,); which are not known (M,); and for each of these, the one that stands
        for it, as a number in 0..M-1 (M,). Two of the same prefix may stand for themselves.
        """
        slot = _slots(hashes)
        with self._lock:
            unknown = np.flatnonzero(self._hashes[slot] != hashes)
            nats = self._nats[slot]
            slot, hashes = slot[unknown], hashes[unknown]
            number = np.arange(len(unknown), dtype=np.int32)
            self._first[slot[::-1]] = number[::-1]
            first = self._first[slot]
        return nats, unknown, np.where(hashes[first] == hashes, first, number)

    def keep(self, hashes: Hashes, nats: Floats) -> None:
        slot = _slots(hashes)
        with self._lock:
            self._hashes[slot] = hashes
            self._nats[slot] = nats  # of two hashes for one slot numpy keeps the last, here and above

    def inputs(self, pieces: Ints, columns: Ints) -> tuple[Inputs, Ints]:
        """Vectors of inputs, and which of them belongs to each of these (piece, column) pairs (P,)."""
        keys = columns * self._vocab + pieces
        with self._lock:
            slots = self._slot[keys]
            new = self._different(keys[slots == 0])
            if self._count + len(new) > len(self._inputs[0]):
                self._forget_inputs(len(np.unique(keys)) + 1)
                new = self._different(keys)
            if len(new):
                begin, self._count = self._count, self._count + len(new)
                where = self._network.bias.device
                made = self._network.first_layers(
                    torch.from_numpy(new % self._vocab).to(where),
                    torch.from_numpy(new // self._vocab).to(where),
                )
                for kept, more in zip(self._inputs, made, strict=True):
                    kept[begin : self._count] = more
                self._slot[new] = np.arange(begin, self._count)
                slots = self._slot[keys]
            return self._inputs, slots.astype(np.int64)

    def _different(self, keys: Ints) -> Ints:
        """Each of these keys without a slot once."""
        number = np.arange(len(keys), dtype=np.int32)
        self._slot[keys] = number  # for this comparison alone
        different: Ints = keys[self._slot[keys] == number]
        self._slot[different] = 0
        return different

    def _forget_inputs(self, least: int) -> None:
        """New arrays, since another thread may read the old ones. Slot 0 is no input's."""
        bias, width = self._network.bias, self._network.token_embedding.embedding_dim
        rows = max(self._most, least)
        # Zeros, so that no batch waits for its pages.
        self._inputs = (bias.new_zeros(rows, width), bias.new_zeros(rows, 3 * width))
        self._slot = np.zeros(self._vocab * self._network.position_embedding.num_embeddings, dtype=np.int32)
        self._count = 1


def _slots(hashes: Hashes) -> Ints:
    slots: Ints = (hashes >> np.uint64(64 - _PREFIX_BITS)).astype(np.int64)
    return slots


def piece_surprisals(
    network: CausalNetwork, lines: EncodedLines, device: torch.device, cache: CausalCache | None = None
) -> Floats:
    """Surprisal in nats of every scored piece, (N,) as in `lines.ids`; 0 for mask tokens.

    `cache` is one of this network.
    """
    out = np.zeros(len(lines.ids), dtype=np.float32)
    room = _BATCH_TOKENS.get(device.type, _BATCH_TOKENS["cpu"])
    with torch.inference_mode():
        cache = cache or CausalCache(network)
        for at, start in lines.batches(room):
            if lines.scored[at].any():
                out[at] = _batch_surprisals(network, lines.ids[at], start, lines.scored[at], cache)
    return out


def _batch_surprisals(
    network: CausalNetwork, ids: Ints, start: Ints, scored: Bools, cache: CausalCache
) -> Floats:
    """(N,) nats of the pieces `ids` (N,) of lines that begin at `start` (L + 1,)."""
    line = np.repeat(np.arange(len(start) - 1), np.diff(start))
    column = np.arange(len(ids)) - start[line]
    where = np.flatnonzero(scored)
    hashes = _prefix_hashes(column, ids, start)[where]
    nats = np.zeros(len(ids), dtype=np.float32)
    nats[where], unknown, owner = cache.nats(hashes)
    stands = np.flatnonzero(owner == np.arange(len(owner)))
    asked = np.zeros(len(ids), dtype=np.bool_)
    asked[where[unknown[stands]]] = True
    if not len(stands):
        return nats
    # A line is read up to its last asked place.
    lengths = np.zeros(len(start) - 1, dtype=np.int64)
    places = np.flatnonzero(asked)
    lengths[line[places]] = column[places] + 1  # the last of a line stays
    read = column < lengths[line]
    # The input of a place is the piece before its target; [CLS] stands before the first one.
    before = np.where(column > 0, np.roll(ids, 1), CLS_ID)[read]
    inputs, slots = cache.inputs(before, column[read])
    input_of = np.zeros(len(ids), dtype=np.int64)
    input_of[read] = slots

    def on_device(array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(network.bias.device)

    packed: list[Packed] = []
    answered: list[Ints] = []
    room = _BATCH_TOKENS.get(network.bias.device.type, _BATCH_TOKENS["cpu"])
    for places, real in rectangles(start, room // _RECTANGLES, lengths):
        chosen = np.flatnonzero(asked[places] & real)
        packed.append((on_device(input_of[places]), on_device(chosen)))
        answered.append(places.ravel()[chosen])
    answers = np.concatenate(answered)
    nats[answers] = network.target_nll(inputs, packed, on_device(ids[answers])).numpy(force=True)
    cache.keep(hashes[unknown[stands]], nats[where[unknown[stands]]])
    nats[where[unknown]] = nats[where[unknown[owner]]]
    return nats


def _prefix_hashes(column: Ints, ids: Ints, start: Ints) -> Hashes:
    """(N,) a hash of each line up to and including each place; equal for equal prefixes.

    A prefix is a set of (column, piece) pairs, so a sum of mixed numbers identifies it (splitmix64, Steele et
    al., OOPSLA 2014) unless 64 bits collide.
    """
    mixed = (column << 32 | ids).astype(np.uint64)
    for shift, factor in _SPLITMIX:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    sums = np.cumsum(mixed ^ (mixed >> np.uint64(31)))
    before = np.append(np.uint64(0), sums)[start[:-1]]
    hashes: Hashes = sums - np.repeat(before, np.diff(start))
    return hashes


def _flat_places(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows.numel(), device=rows.device)


def finite(network: Any) -> bool:
    """Whether every weight is a number."""
    return all(math.isfinite(float(p.detach().sum())) for p in network.parameters())
