"""One fit: a tokenizer and a network learnt from distinct masked lines, step by step.

Lines are drawn by the square root of their count: a line seen a million times must not drown one seen a
hundred times.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from pipeline.errors import TrainingFailed
from pipeline.models.causal import CausalNetwork, set_bias
from pipeline.models.config import MIN_DISTINCT, MIN_RECORDS, ModelConfig, NetworkKind
from pipeline.models.encoder.pretrained import PretrainedTokenizer
from pipeline.models.lexicon import EncodedLines, Lexicon
from pipeline.models.tokenizer import SEP_ID, LineTokenizer, Specials


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How to train. The defaults take 5 to 20 seconds on two CPU cores."""

    model: ModelConfig = field(default_factory=ModelConfig)
    batch: int = 8  # lines per step: many small steps learn more in the same time than few large ones
    learning_rate: float = 6e-3
    epochs: int = 40  # Upper bound by data.
    min_steps: int = 200  # A handful of lines still needs this many steps to be learnt.
    max_steps: int = 800  # A huge sample is seen in part, most frequent lines first.
    max_distinct: int = 20_000  # Lines encoded in memory, about 1 KiB each; more than max_steps can draw.
    tokenizer_lines: int = 5_000  # The most frequent; merges hardly change after that, time does.
    min_distinct: int = MIN_DISTINCT
    min_records: int = MIN_RECORDS
    batch_tokens: int = 256  # ids per step: a log of stack traces trains as fast as one of short lines
    encoder: Path | None = None  # the directory to fine-tune; of NetworkKind.PRETRAINED only
    threads: int = 1  # a second core gained 20 % alone and cost 100 % beside other workers; 0 leaves torch's


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStep:
    """Progress of one fit."""

    step: int
    steps: int
    epoch: float  # lines drawn so far over lines there are
    loss: float  # nats per piece, smoothed


@dataclass(slots=True)
class Fitted:
    """The result of `fit_network`; filled when its iterator ends."""

    network: Any = None
    tokenizer: LineTokenizer | None = None
    steps: int = 0
    epochs: float = 0.0
    loss: float = math.nan


def fit_network(
    lines: pl.DataFrame,
    fitted: Fitted,
    *,
    tokens: Sequence[str],
    config: TrainConfig,
    seed: int,
    device: str,
) -> Iterator[FitStep]:
    """Fits a fresh tokenizer and a network on the lines into `fitted`; yields every tenth step.

    The number of steps depends only on the lines, so the same lines and seed give the same weights on a CPU.
    Every line must hold text as well as mask tokens. Raises TrainingFailed when the loss is not finite.
    """
    texts = lines["masked"].to_list()
    tokenizer = _tokenizer(texts, tokens, config)
    encoded = Lexicon(tokenizer).encode(texts)
    weights = np.sqrt(lines["count"].to_numpy().astype(np.float64))
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    network = _fresh(config, tokenizer)
    if config.model.kind is not NetworkKind.PRETRAINED:
        set_bias(
            _output_bias(network), _piece_frequency(encoded, weights / weights.mean(), tokenizer.vocab_size)
        )
    network = network.to(device).train()
    parameters = list(network.parameters())
    optimizer = FusedAdamW(parameters)
    steps = max(config.min_steps, min(config.max_steps, config.epochs * len(texts) // config.batch))
    loss_mean, drawn = math.nan, 0
    for step, batch in enumerate(
        islice(_batches(encoded, weights, config, rng, tokenizer.specials), steps), 1
    ):
        optimizer.zero_grad()
        loss, nll = network.loss(torch.from_numpy(batch).to(device))
        loss.backward()
        value = nll.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step(config.learning_rate * _rate(step - 1, steps))
        loss_mean = value if math.isnan(loss_mean) else 0.95 * loss_mean + 0.05 * value
        drawn += len(batch)
        if step % 10 == 0 or step == steps:
            yield FitStep(step=step, steps=steps, epoch=drawn / len(texts), loss=loss_mean)
    if not math.isfinite(loss_mean):
        raise TrainingFailed(f"the loss is {loss_mean} after {steps} steps; lower the learning rate")
    fitted.network, fitted.tokenizer = network.eval(), tokenizer
    fitted.steps, fitted.epochs, fitted.loss = steps, drawn / len(texts), loss_mean


def _tokenizer(texts: Sequence[str], tokens: Sequence[str], config: TrainConfig) -> LineTokenizer:
    if config.encoder is not None:
        return PretrainedTokenizer.read(config.encoder, tokens=tokens, max_tokens=config.model.max_tokens)
    return LineTokenizer.train(
        texts[: config.tokenizer_lines],
        tokens=tokens,
        vocab_size=config.model.vocab_size,
        max_tokens=config.model.max_tokens,
    )


def _fresh(config: TrainConfig, tokenizer: LineTokenizer) -> Any:
    """The network that a fit begins with. Raises TrainingFailed where the pretrained one cannot be read."""
    if config.model.kind is NetworkKind.CAUSAL:
        return CausalNetwork(config.model, tokenizer.vocab_size)
    from pipeline.models.encoder import files  # importing transformers takes seconds

    if config.encoder is None:
        return files.configured(config.model, tokenizer)
    try:
        return files.pretrained_network(config.encoder, tokenizer, config.model)
    # transformers raises unrelated classes on damage and on models that are no encoders.
    except Exception as exc:
        first = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise TrainingFailed(
            f"encoder {config.encoder} cannot be read ({first[:300]}); name a masked language model that "
            "save_pretrained has written"
        ) from exc


def _output_bias(network: Any) -> torch.Tensor:
    bias: torch.Tensor = (
        network.bias if isinstance(network, CausalNetwork) else network.inner.get_output_embeddings().bias
    )
    return bias


class FusedAdamW:
    """AdamW (Loshchilov and Hutter, ICLR 2019) with the kernel of `torch.optim.AdamW(fused=True)`, bit by
    bit.

    The first optimizer of torch.optim in a process imports torch._dynamo: 1.8 s, more than a small fit takes.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, weight_decay: float = 0.01) -> None:
        self.parameters = list(parameters)
        self.weight_decay = weight_decay
        self._mean = [torch.zeros_like(p) for p in self.parameters]
        self._square = [torch.zeros_like(p) for p in self.parameters]
        self._steps = [torch.zeros((), dtype=torch.float32, device=p.device) for p in self.parameters]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, learning_rate: float) -> None:
        """One update by the current gradients; a parameter without one counts as having zeros."""
        with torch.no_grad():
            torch._foreach_add_(self._steps, 1)
            torch._fused_adamw_(
                self.parameters,
                [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters],
                self._mean,
                self._square,
                [],
                self._steps,
                amsgrad=False,
                lr=learning_rate,
                beta1=0.9,
                beta2=0.999,
                weight_decay=self.weight_decay,
                eps=1e-8,
                maximize=False,
            )


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate: linear warm-up over a tenth of the steps, linear decay to zero."""
    return min(1.0, (step + 1) / (0.1 * steps)) * (1.0 - step / steps)


def _batches(
    lines: EncodedLines,
    weights: Any,
    config: TrainConfig,
    rng: np.random.Generator,
    specials: Specials,
) -> Iterator[npt.NDArray[np.int64]]:
    """Endless (B, T) batches of lines of similar length, from [CLS] to [SEP]."""
    chances = weights / weights.sum()
    rows = [
        np.concatenate([[specials.cls], lines.ids[a:b], [specials.sep]]).astype(np.int64)
        for a, b in zip(lines.start[:-1].tolist(), lines.start[1:].tolist(), strict=True)
    ]
    lengths = np.array([len(r) for r in rows])
    size = config.batch
    while True:
        drawn = rng.choice(len(rows), size=8 * size, p=chances)
        drawn = drawn[np.argsort(lengths[drawn], kind="stable")]
        for at in rng.permutation(8).tolist():
            chosen = drawn[at * size : (at + 1) * size]
            limit = max(4, config.batch_tokens // int(lengths[chosen[-1]]))
            if limit < size:
                chosen = chosen[np.sort(rng.permutation(size)[:limit])]
            batch = np.full((len(chosen), int(lengths[chosen].max())), specials.pad, dtype=np.int64)
            for b, i in enumerate(chosen.tolist()):
                batch[b, : lengths[i]] = rows[i]
            yield batch


def _piece_frequency(lines: EncodedLines, weights: Any, vocab_size: int) -> npt.NDArray[np.float64]:
    """Weighted occurrences of each piece, (V,); [SEP] ends each line."""
    each = np.repeat(weights, np.diff(lines.start))
    frequency = np.bincount(lines.ids, weights=each, minlength=vocab_size).astype(np.float64)
    frequency[SEP_ID] += weights.sum()
    return frequency
