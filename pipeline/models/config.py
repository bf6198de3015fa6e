"""The shape of a line model's network, as a bundle's manifest tells it. Free of torch."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from pipeline.errors import BadBundle


class NetworkKind(StrEnum):
    """Which network reads a line."""

    MASKED = "masked"  # the first edition, models/masked.py
    CAUSAL = "causal"  # models/causal.py


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the network. 0.1-0.35 M parameters, depending on the vocabulary the data fills."""

    kind: NetworkKind = NetworkKind.CAUSAL
    vocab_size: int = 4096  # upper bound; small logs use a few hundred
    hidden: int = 64  # in a few seconds a wider or deeper network learns less, not more (docs/LOG.md)
    layers: int = 1
    heads: int = 2  # of 32 numbers; narrower ones take three times as long on a CPU
    feed_forward: int = 128
    max_tokens: int = 128
    dropout: float = 0.0  # a fit sees a line too few times to learn it by heart
    groups: int = 6  # K strided masks per line at scoring; of the first edition only
    worst_share: float = 0.2  # k = ceil(share * words) ...
    worst_least: int = 2  # ... and at least this many


# The manifest is data from a store: bound what it can make us allocate.
_LIMITS: Final = {
    "vocab_size": (1, 65536),
    "hidden": (1, 1024),
    "layers": (1, 12),
    "heads": (1, 16),
    "feed_forward": (1, 4096),
    "max_tokens": (8, 512),  # two of them are [CLS] and [SEP]
    "dropout": (0.0, 0.9),
    "groups": (1, 64),
    "worst_share": (0.0, 1.0),
    "worst_least": (1, 512),
}


def model_config(data: Any) -> ModelConfig:
    """From the manifest's configuration; one without a kind is of the first edition. Raises BadBundle."""
    known = asdict(ModelConfig())
    try:
        told = {"kind": NetworkKind.MASKED, **data["model"]}
        made = ModelConfig(**{n: type(known[n])(told[n]) for n in known})
    except (KeyError, TypeError, ValueError) as exc:
        raise BadBundle(
            f"the model configuration {json.dumps(data, default=str)[:200]} is not usable: {exc!r}"
        ) from exc
    wrong = {n: getattr(made, n) for n, (low, top) in _LIMITS.items() if not low <= getattr(made, n) <= top}
    if wrong or made.hidden % made.heads:
        raise BadBundle(
            f"the model configuration has values out of range: {wrong or made.hidden}; train again"
        )
    return made
