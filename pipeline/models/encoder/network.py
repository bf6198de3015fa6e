"""A masked language model of Hugging Face transformers: how unlikely each piece is between its neighbours.

A line of N pieces is read in K rows. Row k hides every K-th piece from the k-th on, so each piece is hidden
once and a line of any length costs K rows (its cost in NuLog is N rows). Mask tokens such as `<IP>` are read
in every row and hidden in none. The output layer runs on the hidden places alone.

A network that is trained from a configuration is self-normalised as that of models/causal.py: scoring needs
one logit per hidden piece. A pretrained network (models/encoder/pretrained.py) keeps its softmax.
"""

from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from pipeline.models.config import ModelConfig, NetworkKind
from pipeline.models.lexicon import Bools, EncodedLines
from pipeline.models.tokenizer import Ints, LineTokenizer, Specials

_LOG_Z_WEIGHT: Final = 0.1  # of (log Z)^2 in the loss, as in models/causal.py
# Ids per K forwards. Batches of one forward are smaller than those of models/causal.py, whose layers run on
# fewer places.
_BATCH_TOKENS: Final = {"cpu": 1 << 13, "cuda": 1 << 17}
_LOGITS: Final = 1 << 24  # of a softmax at once: 64 MiB

Floats = npt.NDArray[np.float32]


class EncoderNetwork(nn.Module):
    """`inner` is a `...ForMaskedLM`; `strides` is K."""

    def __init__(self, inner: Any, tokenizer: LineTokenizer, config: ModelConfig) -> None:
        super().__init__()
        self.inner = inner
        self.specials = tokenizer.specials
        self.strides = config.groups
        self.normalised = config.kind is NetworkKind.TRANSFORMER
        self.vocab_size = int(inner.get_input_embeddings().weight.shape[0])
        hidden = torch.ones(self.vocab_size, dtype=torch.bool)
        hidden[[*self.specials, *tokenizer.fixed]] = False
        self.register_buffer("may_hide", hidden, persistent=False)  # (V,)

    def loss(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss to minimise, NLL in nats per hidden piece) of (B, T) lines from [CLS] to [SEP].

        Draws the hidden pieces from torch's global generator: one of K, and one of each line at least.
        """
        may = cast("torch.Tensor", self.may_hide)[ids]
        draw = torch.rand(ids.shape).to(ids.device).masked_fill(~may, 2.0)
        hide = may & ((draw < 1.0 / self.strides) | (draw == draw.min(dim=1, keepdim=True).values))
        logits, targets = self._logits(ids, hide), ids[hide]  # (N, V), (N,)
        log_z = logits.logsumexp(1)
        nll = (log_z - logits.gather(1, targets[:, None])[:, 0]).mean()
        return (nll + _LOG_Z_WEIGHT * (log_z * log_z).mean() if self.normalised else nll), nll

    def target_nll(self, ids: torch.Tensor, hide: torch.Tensor) -> torch.Tensor:
        """(N,) nats, at least 0, of the N hidden pieces of (B, T) rows, in row-major order."""
        targets = ids[hide]
        if not self.normalised:
            return functional.cross_entropy(self._logits(ids, hide), targets, reduction="none")
        # As the head of `configured` (models/encoder/files.py) does it, for one row of the output matrix.
        head, output = self.inner.lm_head, self.inner.get_output_embeddings()
        hidden = head.layer_norm(functional.gelu(head.dense(self._read(ids, hide)[hide])))
        logits = (hidden * output.weight[targets]).sum(-1) + output.bias[targets]
        return cast("torch.Tensor", (-logits).clamp_min(0.0))

    def _read(self, ids: torch.Tensor, hide: torch.Tensor, *, head: bool = False) -> torch.Tensor:
        """(B, T, D) vectors, or (B, T, V) logits by the head, of rows with hidden places."""
        real = ids != self.specials.pad
        given = {
            "input_ids": ids.masked_fill(hide, self.specials.mask),
            "attention_mask": None if bool(real.all()) else real.long(),
        }
        if head:
            return cast("torch.Tensor", self.inner(**given).logits)
        return cast("torch.Tensor", self.inner.base_model(**given).last_hidden_state)

    def _logits(self, ids: torch.Tensor, hide: torch.Tensor) -> torch.Tensor:
        """(N, V) at the hidden places. A head in one module, as most families have it, runs there alone."""
        head = getattr(self.inner, "lm_head", None) or getattr(self.inner, "cls", None)
        if head is None:
            return self._read(ids, hide, head=True)[hide]
        return cast("torch.Tensor", head(self._read(ids, hide)[hide]))


def masked_surprisals(network: EncoderNetwork, lines: EncodedLines, device: torch.device) -> Floats:
    """Surprisal in nats of every scored piece, (N,) as in `lines.ids`; 0 for mask tokens."""
    out = np.zeros(len(lines.ids), dtype=np.float32)
    room = _BATCH_TOKENS.get(device.type, _BATCH_TOKENS["cpu"]) // network.strides
    if not network.normalised:
        room = min(room, network.strides * _LOGITS // network.vocab_size)
    stride = strides(lines.scored, lines.start, network.strides)
    with torch.inference_mode():
        for places, real in lines.rectangles(room):
            ids = framed_rows(lines.ids[places], real, network.specials)
            which = np.where(real & lines.scored[places], stride[places], -1)
            for k in range(network.strides):
                rows = np.flatnonzero((which == k).any(axis=1))
                if len(rows):
                    hide = np.zeros((len(rows), ids.shape[1]), dtype=np.bool_)
                    hide[:, 1:-1] = which[rows] == k
                    nats = network.target_nll(
                        torch.from_numpy(ids[rows]).to(device), torch.from_numpy(hide).to(device)
                    )
                    out[places[rows][which[rows] == k]] = nats.numpy(force=True)
    return out


def strides(scored: Bools, start: Ints, count: int) -> Ints:
    """(N,) the row in which each scored piece of a line is hidden, 0..count-1."""
    before = np.concatenate([[0], np.cumsum(scored)])
    rank = before[:-1] - np.repeat(before[start[:-1]], np.diff(start))
    found: Ints = rank % count
    return found


def framed_rows(ids: Ints, real: Bools, specials: Specials) -> Ints:
    """(B, T + 2): (B, T) lines between [CLS] and [SEP], padded on the right."""
    rows = np.full((ids.shape[0], ids.shape[1] + 2), specials.pad, dtype=np.int64)
    rows[:, 0] = specials.cls
    rows[:, 1:-1][real] = ids[real]
    rows[np.arange(len(rows)), 1 + real.sum(axis=1)] = specials.sep
    return rows
