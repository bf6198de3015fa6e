"""Encoders as transformers keeps them: built from a configuration, written into a bundle, and read from it.

A bundle of an encoder holds `config.json`, `model.safetensors`, `tokenizer.json` and `tokenizer_config.json`,
so `AutoModel.from_pretrained(bundle)` reads it. Importing this module imports transformers, which takes
seconds.
"""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForMaskedLM, RobertaPreLayerNormConfig
from transformers import logging as transformers_logging
from transformers.models.roberta_prelayernorm.modeling_roberta_prelayernorm import (
    RobertaPreLayerNormForMaskedLM,
)

from pipeline.errors import BadBundle
from pipeline.models import bundle as bundles
from pipeline.models.config import ModelConfig, NetworkKind
from pipeline.models.encoder.directory import encoder_shape
from pipeline.models.encoder.network import EncoderNetwork
from pipeline.models.tokenizer import LineTokenizer

_INIT_STD: Final = 0.05  # near 1/sqrt(width), as in models/causal.py
_SPECIAL_NAMES: Final = ("pad_token", "cls_token", "sep_token", "mask_token")

# Errors are ours to report, and a bar of loaded weights belongs to no worker.
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


def configured(config: ModelConfig, tokenizer: LineTokenizer) -> EncoderNetwork:
    """A fresh network from torch's global generator: RoBERTa with the layer norm before each block.

    BERT's order of the two hardly learns within the steps of a training (docs/LOG.md).
    """
    inner = RobertaPreLayerNormForMaskedLM(
        RobertaPreLayerNormConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.feed_forward,
            max_position_embeddings=config.max_tokens + 1,  # counted from 1; 0 is padding's
            type_vocab_size=1,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=0.0,
            pad_token_id=tokenizer.specials.pad,
            bos_token_id=tokenizer.specials.cls,
            eos_token_id=tokenizer.specials.sep,
            tie_word_embeddings=True,
            initializer_range=_INIT_STD,
        )
    )
    return EncoderNetwork(inner, tokenizer, config)


def pretrained_network(directory: Path, tokenizer: LineTokenizer, config: ModelConfig) -> EncoderNetwork:
    """The pretrained network of a directory that `encoder_shape` has checked, with a row per mask token.

    Nothing is downloaded and no code of the directory runs. Raises what transformers raises on damage.
    """
    inner = _read(directory)
    rows = inner.get_input_embeddings().weight.shape[0]
    if tokenizer.vocab_size > rows:
        inner.resize_token_embeddings(tokenizer.vocab_size, mean_resizing=False)
        with torch.no_grad():  # a mask token begins as the average word
            table = inner.get_input_embeddings().weight
            table[rows:] = table[:rows].mean(dim=0)
    return EncoderNetwork(inner, tokenizer, config)


def encoder_writers(network: EncoderNetwork, tokenizer: LineTokenizer) -> dict[str, Callable[[Path], None]]:
    """Writers of the encoder's files in a bundle, for `write_bundle`."""
    names = tokenizer.special_names
    network.inner.config.architectures = [type(network.inner).__name__]
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": tokenizer.max_tokens,
        **dict(zip(_SPECIAL_NAMES, names, strict=True)),
    }
    return {
        bundles.WEIGHTS: partial(_write_weights, network.inner),
        bundles.ENCODER_CONFIG: partial(_write_text, network.inner.config.to_json_string()),
        bundles.TOKENIZER_CONFIG: partial(_write_text, json.dumps(about, indent=1, sort_keys=True)),
    }


def loaded_encoder(config: ModelConfig, tokenizer: LineTokenizer, bundle: Path) -> EncoderNetwork:
    """The network of a verified bundle. Raises BadBundle, and what transformers raises on damage."""
    shape = encoder_shape(bundle, error=BadBundle)
    wanted = (config.hidden, config.layers, config.heads, config.feed_forward)
    found = (shape.hidden, shape.layers, shape.heads, shape.feed_forward)
    if found != wanted:
        raise BadBundle(f"{bundle} has an encoder of shape {found}, its manifest says {wanted}; train again")
    inner = _read(bundle)
    rows = inner.get_input_embeddings().weight.shape[0]
    if rows < tokenizer.vocab_size or (
        config.kind is NetworkKind.TRANSFORMER and rows != tokenizer.vocab_size
    ):
        raise BadBundle(f"{bundle} has {rows} rows for {tokenizer.vocab_size} pieces; train again")
    return EncoderNetwork(inner, tokenizer, config)


def _read(directory: Path) -> Any:
    settings = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    inner, report = AutoModelForMaskedLM.from_pretrained(
        directory,
        config=settings,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=torch.float32,
        output_loading_info=True,
    )
    if absent := sorted(report["missing_keys"]):
        raise BadBundle(f"{directory / bundles.WEIGHTS} lacks the weights {absent[:3]}")
    return inner


def _write_weights(inner: Any, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent.parent, prefix=".encoder-") as folder:
        inner.save_pretrained(folder, max_shard_size="100GB")
        (Path(folder) / bundles.WEIGHTS).rename(path)


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
