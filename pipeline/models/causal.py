"""A small causal transformer over the pieces (subwords) of a line: how unlikely each is after its prefix.

One forward reads every piece of a line, and every piece is a target in training. The softmax is
self-normalised (Devlin et al., ACL 2014): training pulls log Z towards 0, so that scoring needs only the
logit of the target piece. The output bias begins as the log frequency of each piece, so that no step is spent
on learning frequencies.
"""

import math
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from pipeline.models.config import ModelConfig
from pipeline.models.lexicon import EncodedLines
from pipeline.models.tokenizer import CLS_ID, PAD_ID

# Weight of (log Z)^2 in the loss; 0.03 and 0.1 cost nothing, and at 0.1 the logits are nearer to NLL.
_LOG_Z_WEIGHT: Final = 0.1
_INIT_STD: Final = 0.05  # near 1/sqrt(width)
# Ids per forward: bounds memory for any number of lines. Larger batches fall out of a core's cache.
_BATCH_TOKENS: Final = {"cpu": 1 << 12, "cuda": 1 << 17}
Floats = npt.NDArray[np.float32]


class CausalNetwork(nn.Module):
    """(B, T) ids, rows beginning with [CLS] -> (B, T, D), or (K, D) of the wanted places (B, T). Padding on
    the right is never attended to."""

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

    def forward(self, ids: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        hidden = functional.dropout(hidden, self.dropout, self.training)
        *others, last = self.blocks
        for block in others:
            hidden = block(hidden)
        hidden = last(hidden, wanted)
        return cast("torch.Tensor", self.ln_f(hidden))

    def loss(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss to minimise, NLL in nats per piece) of (B, T) lines from [CLS] to [SEP]."""
        real = ids[:, 1:] != PAD_ID
        hidden, targets = self(ids[:, :-1])[real], ids[:, 1:][real]  # (N, D), (N,)
        logits = functional.linear(hidden, self.token_embedding.weight, self.bias)  # (N, V)
        log_z = logits.logsumexp(1)
        nll = (log_z - logits.gather(1, targets[:, None])[:, 0]).mean()
        return nll + _LOG_Z_WEIGHT * (log_z * log_z).mean(), nll

    def target_nll(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """(K,) nats, at least 0, of the K pieces of (B, T) lines without [CLS] that are `wanted` (B, T)."""
        hidden = self(functional.pad(ids[:, :-1], (1, 0), value=CLS_ID), wanted)  # (K, D)
        targets = ids[wanted]
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

    def forward(self, hidden: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """`wanted` (B, T): the K places whose vectors are asked for, (K, D)."""
        rows, length, width = hidden.shape
        qkv = self.qkv(self.ln_1(hidden)).view(rows, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D/H)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).reshape(rows, length, width)
        if wanted is not None:
            hidden, attended = hidden[wanted], attended[wanted]
        attended = self.proj(attended)
        hidden = hidden + functional.dropout(attended, self.dropout, self.training)
        wide = self.fc_out(functional.gelu(self.fc_in(self.ln_2(hidden))))
        return hidden + functional.dropout(wide, self.dropout, self.training)


def set_bias(bias: torch.Tensor, frequency: npt.NDArray[np.float64]) -> None:
    """Sets an output bias to the log share of each piece (V,); an unseen piece counts as half of one."""
    share = np.log((frequency + 0.5) / (frequency + 0.5).sum())
    with torch.no_grad():
        bias.copy_(torch.from_numpy(share).float())


def piece_surprisals(network: CausalNetwork, lines: EncodedLines, device: torch.device) -> Floats:
    """Surprisal in nats of every scored piece, (N,) as in `lines.ids`; 0 for mask tokens."""
    out = np.zeros(len(lines.ids), dtype=np.float32)
    with torch.inference_mode():
        for places, real in lines.rectangles(_BATCH_TOKENS.get(device.type, _BATCH_TOKENS["cpu"])):
            wanted = real & lines.scored[places]
            if not wanted.any():
                continue
            ids = np.where(real, lines.ids[places], PAD_ID)
            nats = network.target_nll(torch.from_numpy(ids).to(device), torch.from_numpy(wanted).to(device))
            out[places[wanted]] = nats.numpy(force=True)
    return out


def finite(network: Any) -> bool:
    """Whether every weight is a number."""
    return all(math.isfinite(float(p.detach().sum())) for p in network.parameters())
