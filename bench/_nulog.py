"""The peer of the line model: our own re-implementation of the scorer that Opni runs, a NuLog variant.

Written from its description (docs/detection.md names the sources): one encoder layer of width 256; every
token of a line is masked in turn and predicted from the [CLS] position; a line is one forward of as many rows
as it has tokens, and lines are not put together. The score is the share of tokens outside the 50 most likely
ones, so high is anomalous; Opni alerts where the share inside is below 0.7. Kept apart from the product: only
benchmarks use it."""

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional

PAD, CLS, MASK, UNK, NUM = range(5)
_SPECIALS: Final = 5
_SPLIT: Final = re.compile(r"[\s=|:\[\](){}]+")
_DIGITS: Final = re.compile(r"\d.*\d")
_WORDS: Final = re.compile(r"\w")


@dataclass(frozen=True, slots=True, kw_only=True)
class NuLogConfig:
    """As in Opni's inference service."""

    vocab_size: int = 10_000
    max_tokens: int = 64  # with [CLS]
    width: int = 256
    feed_forward: int = 256
    heads: int = 8
    dropout: float = 0.1
    learning_rate: float = 1e-3
    weight_decay: float = 0.005
    batch: int = 32  # lines per step ...
    rows: int = 32  # ... of whose tokens at most this many are masked: all of them would take a CPU a second
    least_steps: int = 60  # whatever the budget; 400 ranked no better on the sets of the triage bench
    epochs: int = 3  # over at most ...
    samples: int = 64_000  # ... this many draws
    top: int = 50


class _Network(nn.Module):
    """(B, T) ids -> (B, V) logits of the masked token, from the [CLS] position."""

    def __init__(self, config: NuLogConfig, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, config.width, padding_idx=PAD)
        self.place = nn.Parameter(_sines(config.max_tokens, config.width), requires_grad=False)
        self.layer = nn.TransformerEncoderLayer(
            config.width, config.heads, config.feed_forward, config.dropout, batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, vocab_size)
        self._scale = math.sqrt(config.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) * self._scale + self.place[: ids.shape[1]]  # (B, T, D)
        hidden = self.layer(hidden, src_key_padding_mask=ids == PAD)
        logits: torch.Tensor = self.out(self.norm(hidden[:, 0]))
        return logits


def _sines(length: int, width: int) -> torch.Tensor:
    """Positions as in Vaswani et al. (2017), (T, D)."""
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).reshape(length, width)


def words(line: str) -> list[str]:
    """Lower-case pieces between blanks, `= | :` and brackets."""
    return [w for w in _SPLIT.split(line.lower()) if w and _WORDS.search(w)]


@dataclass(slots=True)
class NuLog:
    """Fitted once by `fit`; scoring mutates nothing. Runs on `device`, with as many threads as torch has."""

    config: NuLogConfig = field(default_factory=NuLogConfig)
    device: str = "cpu"
    vocabulary: dict[str, int] = field(default_factory=dict)
    network: Any = None
    steps: int = 0

    def fit(self, lines: Sequence[str], counts: Sequence[int], *, seed: int, budget_s: float) -> Self:
        """Learns distinct lines, drawn by the square root of their counts, until the epochs end or, after the
        least steps, the budget."""
        begun = time.monotonic()
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        config = self.config
        seen: Counter[str] = Counter()
        for line, count in zip(lines, counts, strict=True):
            for word in words(line):
                if not _DIGITS.search(word):
                    seen[word] += count
        kept = [w for w, _ in seen.most_common(config.vocab_size - _SPECIALS)]
        self.vocabulary = {w: _SPECIALS + i for i, w in enumerate(kept)}
        network = _Network(config, _SPECIALS + len(kept)).to(self.device)
        encoded = [self.encode(line) for line in lines]
        usable = [i for i, ids in enumerate(encoded) if len(ids) > 1]
        self.network = network.eval()
        if not usable:
            return self
        weight = np.sqrt(np.asarray(counts, dtype=np.float64)[usable])
        weight /= weight.sum()
        optimizer = torch.optim.Adam(
            network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        drawn = config.epochs * min(config.samples, int(sum(counts)))
        network.train()
        for step in range(max(1, math.ceil(drawn / config.batch))):
            if step >= config.least_steps and time.monotonic() - begun > budget_s:
                break
            picked = rng.choice(usable, size=config.batch, p=weight)
            places = [(int(i), t) for i in picked for t in range(1, len(encoded[i]))]
            if len(places) > config.rows:
                places = [places[n] for n in rng.choice(len(places), size=config.rows, replace=False)]
            ids, truth = self._masked([encoded[i] for i, _ in places], [t for _, t in places])
            loss = functional.cross_entropy(network(ids), truth)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            self.steps += 1
        network.eval()
        return self

    def encode(self, line: str) -> list[int]:
        ids = [
            NUM if _DIGITS.search(w) else self.vocabulary.get(w, UNK)
            for w in words(line)[: self.config.max_tokens - 1]
        ]
        return [CLS, *ids]

    def score_line(self, line: str) -> float:
        """0..1: the share of the line's tokens outside the most likely ones. A line of numbers only scores
        0."""
        ids = self.encode(line)
        places = [t for t in range(1, len(ids)) if ids[t] != NUM]
        if not places:
            return 0.0
        rows, truth = self._masked([ids] * len(places), places)
        with torch.inference_mode():
            logits = self.network(rows)  # (L, V)
            best = logits.topk(min(self.config.top, logits.shape[1]), dim=1).indices
            # An unknown word is nothing the network can have expected.
            inside = (best == truth[:, None]).any(dim=1) & (truth != UNK)
        return 1.0 - float(inside.float().mean())

    def score(self, lines: Sequence[str]) -> list[float]:
        """Line after line, as Opni does it."""
        return [self.score_line(line) for line in lines]

    def _masked(
        self, rows: Sequence[Sequence[int]], places: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T) ids with one token masked in each row, and those tokens (B,)."""
        width = max(map(len, rows))
        ids = torch.tensor([[*r, *[PAD] * (width - len(r))] for r in rows], device=self.device)
        at = torch.tensor(places, device=self.device)[:, None]
        truth = ids.gather(1, at)[:, 0]
        return ids.scatter(1, at, MASK), truth
