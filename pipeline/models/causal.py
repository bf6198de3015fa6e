"""A small causal transformer over the pieces of a line: how unlikely each piece is after those before it.

One forward reads every piece of a line, where masking costs one per group of words, and every piece is a target in
training, so the network learns faster per step. The softmax is self-normalised (Devlin et al., ACL 2014): training
pulls log Z towards 0, so that scoring needs the logit of the piece that stands there and no other. The output bias
begins as the log frequency of each piece, so no step is spent on learning which pieces are common.
"""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from pipeline.models.lexicon import Lines
from pipeline.models.shape import ModelConfig
from pipeline.models.tokenizer import CLS_ID, PAD_ID

# Of (log Z)^2 in the loss; 0.03 and 0.1 cost nothing measurable, and at 0.1 the logits are nearer to NLL.
_NORMALISED: Final = 0.1
_SPREAD: Final = 0.05  # of the initial weights: near 1/sqrt(width)
# Ids per forward, bounding memory whatever the number of lines. Larger batches fall out of a core's cache.
_BATCH_TOKENS: Final = {"cpu": 4096, "cuda": 1 << 17}

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

    def surprise(self, ids: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """(B, T) nats, at least 0, of each piece of `truth` after `ids`, which is it moved right by one."""
        logits = (self(ids) * self.pieces(truth)).sum(-1) + self.bias[truth]
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
        rows, length, width = hidden.shape
        split = self.all(self.before(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # (B, H, T, D/H) each
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = self.mix(seen.transpose(1, 2).reshape(rows, length, width))
        hidden = hidden + functional.dropout(mixed, self.dropout, self.training)
        wide = functional.gelu(self.widen(self.between(hidden)))
        return hidden + functional.dropout(self.narrow(wide), self.dropout, self.training)


def begin_with(network: CausalNetwork, frequency: npt.NDArray[np.float64]) -> None:
    """Set the output bias to the log share of each piece (V,), half an occurrence for one never seen."""
    share = np.log((frequency + 0.5) / (frequency + 0.5).sum())
    with torch.no_grad():
        network.bias.copy_(torch.from_numpy(share).float())


def piece_surprises(network: CausalNetwork, lines: Lines, device: torch.device) -> Floats:
    """Nats of every piece, (N,) as in `lines.ids`."""
    out = np.zeros(len(lines.ids), dtype=np.float32)
    room = _BATCH_TOKENS.get(device.type, 4096)
    with torch.inference_mode():
        for _, at, known in lines.batches(room):
            truth = np.where(known, lines.ids[at], PAD_ID)  # (B, T)
            ids = np.empty_like(truth)
            ids[:, 0], ids[:, 1:] = CLS_ID, truth[:, :-1]
            both = torch.from_numpy(np.stack([ids, truth])).to(device)
            out[at[known]] = network.surprise(both[0], both[1]).cpu().numpy()[known]
    return out


def finite(network: Any) -> bool:
    """Whether every weight is a number."""
    return all(math.isfinite(float(p.detach().sum())) for p in network.parameters())
