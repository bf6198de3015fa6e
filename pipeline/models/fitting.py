"""One fit: a tokenizer and a network learnt from distinct masked lines, step by step.

Lines are drawn by the square root of their count, so that a line seen a million times does not
drown one seen a hundred times. Whole pieces are masked, so the rest of a word gives no hint.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import torch
from torch.nn import functional

from pipeline.errors import TrainingFailed
from pipeline.models.line import ModelConfig, build, logits_at, pad
from pipeline.models.tokenizer import MASK_ID, PAD_ID, Encoded, LineTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How to train. The defaults suit two CPU cores and 20 seconds."""

    model: ModelConfig = field(default_factory=ModelConfig)
    batch: int = 32
    learning_rate: float = 3e-3
    mask_share: float = 0.4  # measured better than 0.2 at equal cost: more targets per forward (docs/LOG.md)
    epochs: int = 40  # upper bound by data ...
    min_steps: int = 120  # ... a handful of lines still needs this many steps to be learnt
    max_steps: int = 400  # ... and a huge sample is seen in part, most frequent lines first
    max_distinct: int = 20_000  # lines encoded in memory, about 3 KiB each; more than max_steps can draw
    tokenizer_lines: int = 5_000  # the most frequent; merges hardly change after that, time does
    min_distinct: int = 2
    min_records: int = 20
    batch_tokens: int = 1024  # ids per step: a log of stack traces trains as fast as one of short lines
    threads: int = 1  # a second core gained 20 % alone and cost 100 % beside other workers; 0 leaves torch's


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Where one fit stands."""

    step: int
    steps: int
    epoch: float  # lines drawn so far over lines there are
    loss: float  # nats per masked token, smoothed


@dataclass(slots=True)
class Fitted:
    """What `fit_network` leaves behind; filled when its iterator ends."""

    network: Any = None
    tokenizer: LineTokenizer | None = None
    steps: int = 0
    epochs: float = 0.0
    loss: float = math.nan


def fit_network(
    lines: pl.DataFrame,
    made: Fitted,
    *,
    tokens: Sequence[str],
    config: TrainConfig,
    seed: int,
    device: str,
    budget_s: float | None,
) -> Iterator[Step]:
    """Fits a fresh tokenizer and network on the lines into `made`; yields every tenth step.

    Every line must hold text beside mask tokens. Raises TrainingFailed when the loss is not finite.
    """
    begun = time.monotonic()
    texts = lines["masked"].to_list()
    tokenizer = LineTokenizer.train(
        texts[: config.tokenizer_lines],
        tokens=tokens,
        vocab_size=config.model.vocab_size,
        max_tokens=config.model.max_tokens,
    )
    encoded = tokenizer.encode(texts)
    weights = np.sqrt(lines["count"].to_numpy().astype(np.float64))
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    network = build(config.model, tokenizer.vocab_size).to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.learning_rate, weight_decay=0.01)
    steps = max(config.min_steps, min(config.max_steps, config.epochs * len(texts) // config.batch))
    first = time.monotonic()
    loss_mean, step, seen = math.nan, 0, 0
    for batch in _batches(encoded, weights, config, rng):
        if step == 10 and budget_s is not None:
            # The steps the budget affords, from the first ten: the schedule then still ends at zero.
            now = time.monotonic()
            left = budget_s - (now - begun)
            steps = max(20, min(steps, step + int(left * step / (now - first))))
        if step >= steps:
            break
        ids, where = batch[0].to(device), batch[1].to(device)
        rate = min(1.0, (step + 1) / (0.1 * steps)) * (1.0 - step / steps)  # warm up a tenth, then fall
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(
            logits_at(network, ids.masked_fill(where, MASK_ID), where), ids[where]
        )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        loss_mean = value if math.isnan(loss_mean) else 0.95 * loss_mean + 0.05 * value
        step, seen = step + 1, seen + ids.shape[0]
        if step % 10 == 0 or step == steps:
            yield Step(step=step, steps=steps, epoch=seen / len(texts), loss=loss_mean)
    if not math.isfinite(loss_mean):
        raise TrainingFailed(f"the loss is {loss_mean} after {step} steps; lower the learning rate")
    made.network, made.tokenizer = network.eval(), tokenizer
    made.steps, made.epochs, made.loss = step, seen / len(texts), loss_mean


def _batches(
    encoded: Sequence[Encoded], weights: Any, config: TrainConfig, rng: np.random.Generator
) -> Iterator[tuple[Any, Any]]:
    """Endless (ids (B, T), masked positions (B, T)) batches of lines of similar length."""
    chances = weights / weights.sum()
    # Two masked copies of each of a handful of lines are enough for a step.
    size = min(config.batch, max(8, 2 * len(encoded)))
    while True:
        picked = rng.choice(len(encoded), size=8 * size, p=chances).tolist()
        drawn = sorted(picked, key=lambda i: len(encoded[i].ids))
        for at in rng.permutation(8).tolist():
            chosen = [encoded[i] for i in drawn[at * size : (at + 1) * size]]
            rows = max(4, config.batch_tokens // len(chosen[-1].ids))
            if rows < len(chosen):
                chosen = [chosen[i] for i in sorted(rng.permutation(len(chosen))[:rows].tolist())]
            ids = pad([e.ids for e in chosen], PAD_ID, "cpu")
            where = torch.zeros_like(ids, dtype=torch.bool)
            for b, line in enumerate(chosen):
                pieces = list(dict.fromkeys(p for p in line.piece if p >= 0))
                take = rng.random(len(pieces)) < config.mask_share
                if not take.any():
                    take[rng.integers(len(pieces))] = True
                hidden = {p for p, t in zip(pieces, take.tolist(), strict=True) if t}
                where[b, [t for t, p in enumerate(line.piece) if p in hidden]] = True
            yield ids, where
