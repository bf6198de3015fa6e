"""Checks a directory with a pretrained encoder, before anything heavy is imported. Free of torch.

The directory is what `save_pretrained` of a model and of its tokenizer write: `config.json`,
`model.safetensors`, `tokenizer.json`, `tokenizer_config.json`.
"""

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.errors import BadInput, LogweirError
from pipeline.models import bundle as bundles
from pipeline.models.config import ModelConfig, NetworkKind

_CONFIG_CAP: Final = 1 << 20
# The names of one figure in the configurations of different families.
_NAMES: Final = {
    "hidden": ("hidden_size", "dim", "d_model", "n_embd"),
    "layers": ("num_hidden_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_heads"),
    "feed_forward": ("intermediate_size", "hidden_dim"),
    "vocab_size": ("vocab_size",),
}
_POSITIONS: Final = 4  # at most so many are kept free by families that count positions from 2
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def encoder_shape(directory: Path, *, error: type[LogweirError] = BadInput) -> ModelConfig:
    """The shape of the encoder in a directory. Raises `error` with the remedy."""
    if not directory.is_dir():
        raise error(f"encoder {directory} is no directory; name one that save_pretrained has written")
    if not (directory / bundles.ENCODER_CONFIG).is_file():
        raise error(
            f"encoder {directory} has no config.json; name a directory that save_pretrained has written"
        )
    if not (directory / bundles.WEIGHTS).is_file():
        pickles = sorted(p.name for pattern in _PICKLES for p in directory.glob(pattern))
        if pickles:
            raise error(
                f"encoder {directory} has its weights in {pickles[0]} alone, which can hold code; "
                "save it with safe_serialization=True"
            )
        raise error(f"encoder {directory} has no model.safetensors; save the model there in one file")
    if not (directory / bundles.TOKENIZER).is_file():
        raise error(f"encoder {directory} has no tokenizer.json; save its fast tokenizer there")
    if not (directory / bundles.TOKENIZER_CONFIG).is_file():
        raise error(f"encoder {directory} has no tokenizer_config.json; save its tokenizer there")
    return _shape(directory, read_settings_json(directory / bundles.ENCODER_CONFIG, error), error)


def read_settings_json(path: Path, error: type[LogweirError]) -> dict[str, Any]:
    """A JSON object of at most 1 MiB. Raises `error`."""
    try:
        with path.open("rb") as file:
            text = file.read(_CONFIG_CAP + 1)
        if len(text) > _CONFIG_CAP:
            raise ValueError(f"more than {_CONFIG_CAP} bytes")
        value = json.loads(text)
        if not isinstance(value, dict):
            raise TypeError("no JSON object")
    except (OSError, ValueError, TypeError, RecursionError) as exc:
        raise error(f"{path} cannot be read: {exc}; save the model again") from exc
    return value


def _shape(directory: Path, config: dict[str, Any], error: type[LogweirError]) -> ModelConfig:
    names = config.get("architectures") or []
    if "auto_map" in config or "quantization_config" in config:
        raise error(
            f"encoder {directory} needs code or a quantizer of its own; name one of a plain architecture"
        )
    encoder = any(str(name).endswith("ForMaskedLM") for name in names)
    if config.get("is_decoder") or config.get("is_encoder_decoder") or not encoder:
        raise error(
            f"encoder {directory} holds {', '.join(map(str, names)) or 'no named model'}, which is not an encoder "
            "with a masked-language head; name one such as BertForMaskedLM"
        )
    found = {name: next((config[k] for k in keys if k in config), None) for name, keys in _NAMES.items()}
    positions = config.get("max_position_embeddings")
    if missing := [name for name, value in found.items() if value is None]:
        raise error(
            f"encoder {directory} is a {config.get('model_type')!r} without {missing[0]}, which is not served; "
            "name one such as BERT, RoBERTa, DistilBERT or ModernBERT"
        )
    if isinstance(positions, int):
        found["max_tokens"] = max(1, min(ModelConfig().max_tokens, positions - _POSITIONS))
    try:
        return msgspec.convert({"kind": NetworkKind.PRETRAINED.value, **found}, ModelConfig)
    except ValueError as exc:
        raise error(f"encoder {directory} has a shape that is not served: {exc}; name a smaller one") from exc
