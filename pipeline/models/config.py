"""The shape of a line model's network, as the manifest of a bundle holds it. Free of torch."""

import json
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from pipeline.errors import BadBundle

# Of a sample that anything can be learnt from.
MIN_RECORDS: Final = 20
FIT_MOST_S: Final = 600.0  # of a fit on a busy machine or of a large encoder; 5 to 20 s are usual
MIN_DISTINCT: Final = 2


class NetworkKind(StrEnum):
    """Which network reads a line."""

    CAUSAL = "causal"  # models/causal.py
    TRANSFORMER = "transformer"  # models/encoder/, trained from a configuration
    PRETRAINED = "pretrained"  # models/encoder/, fine-tuned from a directory of the user


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the network. 0.1-0.35 M parameters, depending on the vocabulary the data fills.

    A manifest is data from a store: the bounds limit the memory that a manifest can make us allocate.
    """

    kind: NetworkKind = NetworkKind.CAUSAL
    vocab_size: Annotated[int, Meta(ge=1, le=65536)] = 4096  # upper bound; small logs use a few hundred
    # In a few seconds a wider or deeper network learns less, not more (docs/LOG.md).
    hidden: Annotated[int, Meta(ge=1, le=1024)] = 64
    layers: Annotated[int, Meta(ge=1, le=12)] = 1
    heads: Annotated[int, Meta(ge=1, le=16)] = (
        2  # of 32 numbers; narrower ones take three times as long on a CPU
    )
    feed_forward: Annotated[int, Meta(ge=1, le=4096)] = 128
    max_tokens: Annotated[int, Meta(ge=8, le=512)] = 128  # two of them are [CLS] and [SEP]
    dropout: Annotated[float, Meta(ge=0.0, le=0.9)] = 0.0  # a fit sees a line too few times to overfit
    groups: Annotated[int, Meta(ge=1, le=64)] = (
        6  # K rows per line, each with every K-th piece hidden; of encoders only
    )


class _TrainedWith(msgspec.Struct):
    model: ModelConfig


def model_config(data: Any) -> ModelConfig:
    """The network's shape from the configuration in a manifest. Raises BadBundle."""
    try:
        config = msgspec.convert(data, _TrainedWith).model
        if missing := {field.name for field in fields(ModelConfig)} - set(data["model"]):
            raise ValueError(f"it lacks {sorted(missing)}")
        if config.hidden % config.heads:
            raise ValueError(f"hidden {config.hidden} is no multiple of heads {config.heads}")
    except ValueError as exc:
        raise BadBundle(
            f"the model configuration {json.dumps(data, default=str)[:200]} is not usable: {exc}; train again"
        ) from exc
    return config
