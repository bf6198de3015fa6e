"""The line model: a small BERT with pre-layer-norm, trained from scratch as a masked-language model.

A line's surprise is the mean NLL of its worst tokens, each predicted while its whole word piece is
masked. Pieces are masked in K strided groups, so a line costs K forwards whatever its length, where
NuLog and pseudo-log-likelihood scoring (Salazar et al., ACL 2020) cost one per token. Mean of the
worst k tokens rather than of all: one wrong word in a familiar sentence must not be averaged away.
"""

import copy
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers.models.roberta_prelayernorm.configuration_roberta_prelayernorm import (
    RobertaPreLayerNormConfig,
)
from transformers.models.roberta_prelayernorm.modeling_roberta_prelayernorm import (
    RobertaPreLayerNormForMaskedLM,
)

from pipeline.errors import BadBundle
from pipeline.models import bundle as bundles
from pipeline.models.severity import severity_words
from pipeline.models.threshold import Evidence
from pipeline.models.tokenizer import MASK_ID, PAD_ID, Encoded, LineTokenizer

_WORDS_SHOWN: Final = 5
_WORD_CHARS: Final = 64  # of a shown word; longer ones are blobs
_PUNCTUATION: Final = "\"'`.,:;!?()[]{}=|#*"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the network. 0.4-0.9 M parameters, depending on the vocabulary the data fills."""

    vocab_size: int = 4096  # upper bound; small logs use a few hundred
    hidden: int = 128  # BERT-tiny's shape: more layers or width cost time and found no more faults
    layers: int = 2
    heads: int = 4
    feed_forward: int = 256
    max_tokens: int = 128
    dropout: float = 0.1
    groups: int = 6  # K strided masks per line at scoring
    worst_share: float = 0.2  # k = ceil(share * tokens) ...
    worst_least: int = 2  # ... and at least this many


def build(config: ModelConfig, vocab_size: int) -> Any:
    """A fresh network with tied embeddings, initialised from torch's global generator.

    BERT with the layer norm before each block: in the few hundred steps we have it comes further
    than BertForMaskedLM and ModernBERT of the same size (docs/LOG.md).
    """
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
            initializer_range=0.05,  # BERT's 0.02 is made for width 768; this is near 1/sqrt(width)
        )
    )


def pad(rows: Sequence[Sequence[int]], fill: int, device: Any) -> Any:
    """(B,) lists -> (B, T) int64 tensor."""
    width = max(len(r) for r in rows)
    return torch.tensor([[*r, *[fill] * (width - len(r))] for r in rows], dtype=torch.long, device=device)


def logits_at(model: Any, ids: Any, where: Any) -> Any:
    """Vocabulary logits (N, V) at the N true positions of `where` (B, T); the head runs only there."""
    hidden = model.roberta_prelayernorm(
        input_ids=ids, attention_mask=(ids != PAD_ID).long()
    ).last_hidden_state  # (B, T, D)
    return model.lm_head(hidden[where])


def normal_words(text: str) -> list[str]:
    """The words of a masked line as they are compared: lower case, outer punctuation off."""
    return [w for w in (raw.strip(_PUNCTUATION).casefold() for raw in text.split()) if w]


def token_surprises(
    model: Any, encoded: Sequence[Encoded], *, groups: int, device: Any, batch_tokens: int = 4096
) -> list[list[float]]:
    """NLL in nats of every id of every line, NaN where it is not scored (specials, mask tokens).

    Memory is bounded by `batch_tokens` ids per forward, whatever the number of lines.
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
            ids = pad([encoded[i].ids for i, _ in chunk], PAD_ID, device)  # (B, T)
            where = torch.zeros_like(ids, dtype=torch.bool)
            for b, (_, places) in enumerate(chunk):
                where[b, places] = True
            truth = ids[where]
            loss = functional.cross_entropy(
                logits_at(model, ids.masked_fill(where, MASK_ID), where), truth, reduction="none"
            ).tolist()
            at = 0
            for i, places in chunk:
                for place, value in zip(places, loss[at : at + len(places)], strict=True):
                    out[i][place] = value
                at += len(places)
            start = stop
    return out


def summarise(values: Sequence[float], config: ModelConfig) -> tuple[float, int]:
    """(mean of the worst tokens in nats, number of scored tokens)."""
    scored = sorted((v for v in values if not math.isnan(v)), reverse=True)
    if not scored:
        return 0.0, 0
    k = min(len(scored), max(config.worst_least, math.ceil(config.worst_share * len(scored))))
    return sum(scored[:k]) / k, len(scored)


class LineModel:
    """A loaded model version. Scoring mutates nothing."""

    def __init__(
        self, network: Any, tokenizer: LineTokenizer, config: ModelConfig, words: Iterable[str], device: str
    ) -> None:
        self.device = torch.device(device)
        self.network = network.to(self.device).eval()
        self.tokenizer = tokenizer
        self.config = config
        self._words = frozenset(words)
        self._masks = re.compile("|".join(map(re.escape, tokenizer.tokens)) or r"(?!)", re.IGNORECASE)

    @classmethod
    def load(cls, bundle_dir: Path, device: str = "cpu", threads: int | None = 1) -> "LineModel":
        """Verifies and loads a bundle. `threads` sets torch's for the whole process (None: leave it). Raises BadBundle."""
        if threads is not None:
            torch.set_num_threads(threads)
        manifest = bundles.load_manifest(bundle_dir)
        config = model_config(manifest.config)
        tokenizer = LineTokenizer.from_file(
            bundle_dir / bundles.TOKENIZER, tokens=manifest.tokens, max_tokens=config.max_tokens
        )
        try:
            # "meta" skips the random initialisation that the weights would overwrite.
            with torch.device("meta"):
                network = build(config, tokenizer.vocab_size)
            network.to_empty(device="cpu")
            # Buffers that are not part of the weights are made here.
            embeddings = network.roberta_prelayernorm.embeddings
            embeddings.position_ids = torch.arange(config.max_tokens + 1).expand((1, -1))
            embeddings.token_type_ids = torch.zeros((1, config.max_tokens + 1), dtype=torch.long)
            network.tie_weights()
            weights = bundle_dir / bundles.WEIGHTS
            with weights.open("rb") as file:
                bundles.weights_header(file, weights.stat().st_size)
            state = load_file(weights)
            absent, strange = network.load_state_dict(state, strict=False)
            if strange or set(absent) - TIED:
                raise BadBundle(
                    f"{bundle_dir}: weights {sorted(set(absent) - TIED)} are absent, {strange} unknown"
                )
            words = pl.read_parquet(bundle_dir / bundles.WORDS)["word"].to_list()
        except BadBundle:
            raise
        # safetensors, torch and Polars raise unrelated classes on damage, and panics are no Exceptions.
        except (Exception, pl.exceptions.PanicException) as exc:
            raise BadBundle(f"{bundle_dir} cannot be loaded: {exc}; train again") from exc
        return cls(network, tokenizer, config, words, device)

    def on(self, device: str) -> "LineModel":
        """The same model with weights of its own on another device."""
        network = copy.deepcopy(self.network)
        return LineModel(network, self.tokenizer, self.config, self._words, device)

    def score(self, masked: Sequence[str]) -> list[Evidence]:
        """One Evidence per masked line, in order."""
        out: list[Evidence] = []
        for at in range(0, len(masked), 2048):  # bounds the encoded lines held at a time
            lines = masked[at : at + 2048]
            encoded = self.tokenizer.encode(lines)
            values = token_surprises(self.network, encoded, groups=self.config.groups, device=self.device)
            out += [self._evidence(*row) for row in zip(lines, encoded, values, strict=True)]
        return out

    def _evidence(self, line: str, encoded: Encoded, values: Sequence[float]) -> Evidence:
        surprise, tokens = summarise(values, self.config)
        worst: dict[int, float] = {}
        for word, value in zip(encoded.word, values, strict=True):
            if word >= 0 and not math.isnan(value):
                worst[word] = max(worst.get(word, 0.0), value)
        # Words near the line's worst explain the score; expected words would only be noise.
        floor = 0.5 * max(worst.values(), default=0.0)
        ranked = sorted(
            (w for w in worst if worst[w] >= floor and self._says(encoded.words[w])), key=lambda w: -worst[w]
        )
        shown = list(dict.fromkeys(encoded.words[w][:_WORD_CHARS] for w in ranked))[:_WORDS_SHOWN]
        new = dict.fromkeys(w for w in normal_words(line) if w not in self._words and self._says(w))
        return Evidence(
            surprise=round(surprise, 4),
            words=tuple(shown),
            unseen=tuple(w[:_WORD_CHARS] for w in list(new)[: 4 * _WORDS_SHOWN]),
            tokens=tokens,
            severity=severity_words(line),
        )

    def _says(self, word: str) -> bool:
        """Whether a word holds more than masks and punctuation."""
        return any(c.isalnum() for c in self._masks.sub("", word))


# The output matrix is the input embedding; safetensors stores shared memory once.
TIED: Final = frozenset({"lm_head.decoder.weight", "lm_head.decoder.bias"})


def stored_state(network: Any) -> dict[str, Any]:
    """Contiguous CPU tensors without the tied copies, as the weights file holds them."""
    state = network.state_dict()
    return {k: v.detach().cpu().contiguous() for k, v in state.items() if k not in TIED}


def model_config(data: Any) -> ModelConfig:
    """From the manifest's configuration. Raises BadBundle."""
    known = asdict(ModelConfig())
    try:
        found = {name: data["model"][name] for name in known}
        made = ModelConfig(**{n: type(known[n])(v) for n, v in found.items()})
    except (KeyError, TypeError, ValueError) as exc:
        raise BadBundle(
            f"the model configuration {json.dumps(data, default=str)[:200]} is not usable: {exc!r}"
        ) from exc
    # The manifest is data from a store: bound what it can make us allocate.
    limits = {
        "vocab_size": 65536,
        "hidden": 1024,
        "layers": 12,
        "heads": 16,
        "feed_forward": 4096,
        "max_tokens": 512,
        "groups": 64,
    }
    wrong = {n: getattr(made, n) for n, top in limits.items() if not 1 <= getattr(made, n) <= top}
    if wrong or made.hidden % made.heads:
        raise BadBundle(
            f"the model configuration has values out of range: {wrong or made.hidden}; train again"
        )
    return made
