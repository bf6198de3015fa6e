"""One fit: a tokenizer and a network learnt from distinct masked lines, step by step.

Lines are drawn by the square root of their count: a line seen a million times must not drown one seen a
hundred times. A warm start copies the weights of an earlier version, piece by piece, and takes fewer steps.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from safetensors import SafetensorError

from pipeline.errors import BadBundle, TrainingFailed
from pipeline.logs import logger
from pipeline.models import bundle as bundles
from pipeline.models.causal import CausalNetwork, finite, set_bias
from pipeline.models.config import MIN_DISTINCT, MIN_RECORDS, ModelConfig, NetworkKind, model_config
from pipeline.models.encoder.pretrained import PretrainedTokenizer
from pipeline.models.fits.state import FitSharing
from pipeline.models.lexicon import EncodedLines, Lexicon
from pipeline.models.line import bundle_tokenizer, loaded
from pipeline.models.tokenizer import SEP_ID, LineTokenizer, Specials

SHARING: Final = FitSharing()  # one process, and nothing is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How to train. The defaults suit two CPU cores and 20 seconds."""

    model: ModelConfig = field(default_factory=ModelConfig)
    batch: int = 8  # lines per step: many small steps learn more in the same time than few large ones
    learning_rate: float = 6e-3
    epochs: int = 40  # Upper bound by data.
    min_steps: int = 200  # A handful of lines still needs this many steps to be learnt.
    max_steps: int = 800  # A huge sample is seen in part, most frequent lines first.
    least_steps: int = 120  # Past the budget, as far as the grace allows; 20 steps learn nothing.
    warm_share: float = 0.5  # Of the steps of a cold start; reaches its loss (docs/LOG.md).
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
    warm: bool = False  # began with the weights of an earlier version


def fit_network(
    lines: pl.DataFrame,
    fitted: Fitted,
    *,
    tokens: Sequence[str],
    config: TrainConfig,
    seed: int,
    device: str,
    budget_s: float | None,
    grace_s: float = 0.0,
    warm: Path | None = None,
    sharing: FitSharing = SHARING,
) -> Iterator[FitStep]:
    """Fits a fresh tokenizer and a network on the lines into `fitted`; yields every tenth step.

    `grace_s`: seconds past the budget for the least steps. `warm`: the bundle to begin with; the start is
    cold where that bundle cannot be used. `sharing`: the processes that fit it together, all with the
    same arguments, and where it is kept and gone on with. Every line must hold text beside mask tokens.
    Raises TrainingFailed when the loss is not finite.
    """
    began = time.monotonic()
    world, kept = sharing.world, sharing.kept
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
        fitted.warm = warm is not None and _copy_weights(network, tokenizer, config.model, warm)
    network = network.to(device).train()
    parameters = list(network.parameters())
    world.spread(parameters)
    optimizer = FusedAdamW(parameters)
    steps = max(config.min_steps, min(config.max_steps, config.epochs * len(texts) // config.batch))
    if fitted.warm:
        steps = max(1, round(config.warm_share * steps))
    first = time.monotonic()
    loss_mean, step, drawn = math.nan, 0, 0
    place = None if kept is None else kept.restore(optimizer.tensors)
    if place is not None:
        loss_mean, step, steps, drawn = place.loss, place.step, place.steps, place.drawn
    for batch in islice(_batches(encoded, weights, config, rng, tokenizer.specials), step, None):
        if step == 10 and budget_s is not None:
            # Ten steps tell how many the budget affords; the learning rate then still ends at zero.
            now = time.monotonic()
            left_s = budget_s - (now - began)
            steps = affordable_steps(
                steps, step, took_s=now - first, left_s=left_s, grace_s=grace_s, minimum=config.least_steps
            )
            steps = world.agree(steps)
        if step >= steps:
            break
        optimizer.zero_grad()
        loss, nll = network.loss(torch.from_numpy(batch).to(device), world.rows)
        if loss.requires_grad:  # else the batch has fewer lines than the world processes
            loss.backward()
        value = world.add_up(parameters, nll).item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step(config.learning_rate * _rate(step, steps))
        loss_mean = value if math.isnan(loss_mean) else 0.95 * loss_mean + 0.05 * value
        step, drawn = step + 1, drawn + len(batch)
        if step % 10 == 0 or step == steps:
            if kept is not None and step > 10:  # the tenth step still decides how many there are
                kept.save(step=step, steps=steps, drawn=drawn, loss=loss_mean, tensors=optimizer.tensors)
            yield FitStep(step=step, steps=steps, epoch=drawn / len(texts), loss=loss_mean)
    if not math.isfinite(loss_mean):
        raise TrainingFailed(f"the loss is {loss_mean} after {step} steps; lower the learning rate")
    fitted.network, fitted.tokenizer = network.eval(), tokenizer
    fitted.steps, fitted.epochs, fitted.loss = step, drawn / len(texts), loss_mean


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

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters, and all that an update depends on beside their gradients."""
        return [*self.parameters, *self._mean, *self._square, *self._steps]

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


def affordable_steps(
    steps: int, completed: int, *, took_s: float, left_s: float, grace_s: float, minimum: int
) -> int:
    """How many of `steps` there is time for, when `completed` of them took `took_s`; at least 20."""
    each_s = max(took_s, 1e-6) / completed
    in_time = completed + int(left_s / each_s)
    late = min(minimum, completed + int((max(0.0, left_s) + grace_s) / each_s))
    return max(20, min(steps, max(in_time, late)))


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


def _copy_weights(network: Any, tokenizer: LineTokenizer, config: ModelConfig, parent: Path) -> bool:
    """Copies the weights of an earlier version: the rows of pieces that both know, and all other layers.

    False where the parent cannot be used; the log then says why, and the network is unchanged.
    """
    try:
        manifest = bundles.load_manifest(parent)
        parent_config = model_config(manifest.config)
        if _shape(parent_config) != _shape(config):
            raise BadBundle(f"its network is {_shape(parent_config)}, this one {_shape(config)}")
        old = bundle_tokenizer(parent_config, parent, tokens=manifest.tokens)
        parent_network = loaded(parent_config, old, parent)
        if not finite(parent_network):
            raise BadBundle("it has weights that are no numbers")
    # Damage shows as unrelated classes of safetensors and torch; a cold start is always right.
    except (BadBundle, SafetensorError, OSError, RuntimeError, ValueError, KeyError) as exc:
        logger(parent=parent.name).warning("fit.cold", why=str(exc))
        return False
    ids, old_ids = tokenizer.vocabulary(), old.vocabulary()
    both = [(i, old_ids[piece]) for piece, i in ids.items() if piece in old_ids]
    here, there = (torch.tensor(side) for side in zip(*both, strict=True))
    theirs = dict(parent_network.named_parameters())
    by_piece = _by_piece(network)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in by_piece:
                parameter[here] = theirs[name][there]
            else:
                parameter.copy_(theirs[name])
    logger(parent=parent.name).info("fit.warm", pieces=len(ids), shared=len(both))
    return True


def _by_piece(network: Any) -> frozenset[str]:
    """The names of the parameters that have a row per piece. Tied ones have one name."""
    if isinstance(network, CausalNetwork):
        return frozenset({"token_embedding.weight", "bias"})
    output = network.inner.get_output_embeddings()
    rows = (network.inner.get_input_embeddings().weight, output.weight, output.bias)
    return frozenset(n for n, p in network.named_parameters() if any(p is one for one in rows))


def _shape(config: ModelConfig) -> tuple[NetworkKind, int, int, int, int, int]:
    return config.kind, config.hidden, config.layers, config.heads, config.feed_forward, config.max_tokens


def learnt_by(parent: Path, frame: pl.DataFrame, held_out: frozenset[int]) -> frozenset[int]:
    """The held-out patterns whose like the weights of the parent have seen.

    These are the pattern itself, or any line of its template where the whole template is held out now. Empty
    where the parent cannot be read: an unreadable parent teaches nothing.
    """
    try:
        not_learnt = frozenset(bundles.load_manifest(parent).held_out)
        patterns = bundles.load_known(parent).without(not_learnt, frozenset())
    except (BadBundle, OSError):
        return frozenset()
    out = pl.col("pattern_id").is_in(sorted(held_out))
    rows = frame.with_columns(out=out, whole=out.all().over("template_id")).filter("out")
    return frozenset(
        pattern
        for pattern, template, every_line in rows.select("pattern_id", "template_id", "whole").iter_rows()
        if patterns.count(pattern) or (every_line and patterns.template_count(template))
    )
