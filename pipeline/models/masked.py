"""A masked language model of lines: a small BERT that predicts masked words, read in K strided passes.

Loaded, never trained. Its successor is models/causal.py; docs/LOG.md compares both.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.nn import functional
from transformers.models.roberta_prelayernorm.configuration_roberta_prelayernorm import (
    RobertaPreLayerNormConfig,
)
from transformers.models.roberta_prelayernorm.modeling_roberta_prelayernorm import (
    RobertaPreLayerNormForMaskedLM,
)

from pipeline.models.config import ModelConfig
from pipeline.models.tokenizer import MASK_ID, PAD_ID, Encoded, LineTokenizer

# The output matrix is the input embedding; safetensors stores shared memory once.
TIED: Final = frozenset({"lm_head.decoder.weight", "lm_head.decoder.bias"})


def build_masked(config: ModelConfig, vocab_size: int) -> Any:
    """A fresh network with tied embeddings: BERT with the layer norm before each block."""
    return RobertaPreLayerNormForMaskedLM(
        RobertaPreLayerNormConfig(
            vocab_size=vocab_size,
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.feed_forward,
            max_position_embeddings=config.max_tokens + 1,  # counted from 1; 0 is padding's
            type_vocab_size=1,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=0.0,
            pad_token_id=PAD_ID,
            tie_word_embeddings=True,
            initializer_range=0.05,
        )
    )


def restore_buffers(network: Any, config: ModelConfig) -> None:
    """Fills the buffers and ties the output matrix; neither is stored with the weights."""
    embeddings = network.roberta_prelayernorm.embeddings
    embeddings.position_ids = torch.arange(config.max_tokens + 1).expand((1, -1))
    embeddings.token_type_ids = torch.zeros((1, config.max_tokens + 1), dtype=torch.long)
    network.tie_weights()


def readings(
    network: Any,
    tokenizer: LineTokenizer,
    config: ModelConfig,
    lines: Sequence[str],
    device: Any,
    *,
    says: Callable[[str], bool],
) -> Iterator[tuple[float, int, list[str]]]:
    """Per line: mean NLL of its worst tokens in nats, number of scored tokens, words near the worst."""
    encoded = tokenizer.encode(lines)
    for line, values in zip(
        encoded, token_surprisals(network, encoded, groups=config.groups, device=device), strict=True
    ):
        worst: dict[int, float] = {}
        for word, value in zip(line.word, values, strict=True):
            if word >= 0 and not math.isnan(value):
                worst[word] = max(worst.get(word, 0.0), value)
        floor = 0.5 * max(worst.values(), default=0.0)
        ranked = sorted(
            (w for w in worst if worst[w] >= floor and says(line.words[w])), key=lambda w: -worst[w]
        )
        yield *summarise(values, config), [line.words[w] for w in ranked]


def summarise(values: Sequence[float], config: ModelConfig) -> tuple[float, int]:
    """(mean of the worst tokens in nats, number of scored tokens)."""
    scored = sorted((v for v in values if not math.isnan(v)), reverse=True)
    if not scored:
        return 0.0, 0
    k = min(len(scored), max(config.worst_least, math.ceil(config.worst_share * len(scored))))
    return sum(scored[:k]) / k, len(scored)


def token_surprisals(
    network: Any, encoded: Sequence[Encoded], *, groups: int, device: Any, batch_tokens: int = 4096
) -> list[list[float]]:
    """NLL in nats of every id of every line, NaN where it is not scored (specials, mask tokens).

    Each id is predicted while its whole word piece is masked. Pieces are masked in `groups` strided groups,
    so a line of any length costs that many forwards. `batch_tokens` ids per forward bound memory.
    """
    out = [[math.nan] * len(e.ids) for e in encoded]
    # (line, group): one forward row each; sorted by length so that a batch pads little.
    rows: list[tuple[int, list[int]]] = []
    for i, line in enumerate(encoded):
        order = {piece: n for n, piece in enumerate(dict.fromkeys(p for p in line.piece if p >= 0))}
        count = min(groups, len(order))
        for g in range(count):
            rows.append((i, [t for t, p in enumerate(line.piece) if p >= 0 and order[p] % count == g]))
    rows.sort(key=lambda r: len(encoded[r[0]].ids))
    start = 0
    with torch.inference_mode():
        while start < len(rows):
            stop, width = start, 0
            while stop < len(rows):
                width = max(width, len(encoded[rows[stop][0]].ids))
                if stop > start and width * (stop - start + 1) > batch_tokens:
                    break
                stop += 1
            chunk = rows[start:stop]
            ids = _padded([encoded[i].ids for i, _ in chunk], device)  # (B, T)
            where = torch.zeros_like(ids, dtype=torch.bool)
            for b, (_, places) in enumerate(chunk):
                where[b, places] = True
            truth = ids[where]
            loss = functional.cross_entropy(
                _logits_at(network, ids.masked_fill(where, MASK_ID), where), truth, reduction="none"
            ).tolist()
            at = 0
            for i, places in chunk:
                for place, value in zip(places, loss[at : at + len(places)], strict=True):
                    out[i][place] = value
                at += len(places)
            start = stop
    return out


def _logits_at(network: Any, ids: Any, where: Any) -> Any:
    """Vocabulary logits (N, V) at the N true positions of `where` (B, T); the head runs only there."""
    hidden = network.roberta_prelayernorm(
        input_ids=ids, attention_mask=(ids != PAD_ID).long()
    ).last_hidden_state  # (B, T, D)
    return network.lm_head(hidden[where])


def _padded(rows: Sequence[Sequence[int]], device: Any) -> Any:
    """(B,) lists -> (B, T) int64 tensor."""
    width = max(len(r) for r in rows)
    return torch.tensor([[*r, *[PAD_ID] * (width - len(r))] for r in rows], dtype=torch.long, device=device)
