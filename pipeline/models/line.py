"""The line model: the surprisal of a masked line, and the words that cause it.

A line's surprisal is the mean over its pieces, in nats, under a small causal transformer (models/causal.py).
The network is trained from scratch on the distinct lines of the sample. The words with the most unlikely
pieces explain it.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import torch
from safetensors.torch import load_file

from pipeline.errors import BadBundle
from pipeline.models import bundle as bundles
from pipeline.models.causal import CausalNetwork, finite, piece_surprisals
from pipeline.models.config import ModelConfig, NetworkKind, model_config
from pipeline.models.encoder.pretrained import PretrainedTokenizer
from pipeline.models.evidence import Evidence
from pipeline.models.lexicon import EncodedLines, Lexicon
from pipeline.models.novelty import Novelty
from pipeline.models.prior import OUTER_PUNCTUATION, SeverityPrior
from pipeline.models.severity import may_be_severe, severity_words
from pipeline.models.tokenizer import LineTokenizer

_AT_ONCE: Final = 2048  # lines; bounds what is encoded at a time
_WORDS_SHOWN: Final = 5
_UNSEEN_SHOWN: Final = 4 * _WORDS_SHOWN
_WORD_CHARS: Final = 64  # of a shown word; longer ones are blobs
_LETTER: Final = re.compile(r"[^\W_]")  # or digit
_SAYS, _UNSEEN = 1, 2  # flags of a word in the lexicon


def loaded(config: ModelConfig, tokenizer: LineTokenizer, bundle: Path) -> Any:
    """The network of a verified bundle. Raises BadBundle, and what safetensors and torch raise on damage."""
    if config.kind is not NetworkKind.CAUSAL:
        from pipeline.models.encoder.files import loaded_encoder  # importing transformers takes seconds

        return loaded_encoder(config, tokenizer, bundle)
    weights = bundle / bundles.WEIGHTS
    network = CausalNetwork(config, tokenizer.vocab_size)
    absent, strange = network.load_state_dict(load_file(weights), strict=False)
    if strange or absent:
        raise BadBundle(f"{weights}: weights {sorted(absent)} are absent, {strange} unknown")
    return network


def bundle_tokenizer(config: ModelConfig, bundle: Path, *, tokens: tuple[str, ...]) -> LineTokenizer:
    """The tokenizer of a verified bundle. Raises BadBundle."""
    if config.kind is NetworkKind.PRETRAINED:
        return PretrainedTokenizer.read(bundle, tokens=tokens, max_tokens=config.max_tokens, error=BadBundle)
    return LineTokenizer.from_file(bundle / bundles.TOKENIZER, tokens=tokens, max_tokens=config.max_tokens)


def normal_words(text: str) -> list[str]:
    """The words of a masked line as they are compared: lower case, outer punctuation off."""
    return [w for w in map(_normal, text.split()) if w]


def _normal(word: str) -> str:
    return word.strip(OUTER_PUNCTUATION).casefold()


class LineModel:
    """A loaded model version. Scoring mutates nothing but caches."""

    def __init__(
        self,
        network: Any,
        tokenizer: LineTokenizer,
        config: ModelConfig,
        words: Iterable[str],
        device: str,
        *,
        novelty: Novelty,
        prior: SeverityPrior,
    ) -> None:
        self.device = torch.device(device)
        self.network = network.to(self.device).eval()
        self.tokenizer = tokenizer
        self.config = config
        self._words = frozenset(words)
        self._novelty = novelty
        self._prior = prior
        self._masks = re.compile("|".join(map(re.escape, tokenizer.tokens)) or r"(?!)", re.IGNORECASE)
        self._lexicon = Lexicon(tokenizer, self._describe)

    @classmethod
    def load(cls, bundle_dir: Path, device: str = "cpu", threads: int | None = 1) -> "LineModel":
        """Verifies and loads a bundle. Raises BadBundle.

        `threads` sets torch's for the whole process (None: leave them).
        """
        if threads is not None:
            torch.set_num_threads(threads)
        manifest = bundles.load_manifest(bundle_dir)
        config = model_config(manifest.config)
        tokenizer = bundle_tokenizer(config, bundle_dir, tokens=manifest.tokens)
        try:
            network = loaded(config, tokenizer, bundle_dir)
            words = pl.read_parquet(bundle_dir / bundles.WORDS)["word"].to_list()
            novelty = Novelty.from_bytes((bundle_dir / bundles.NOVELTY).read_bytes())
            prior = SeverityPrior.from_bytes((bundle_dir / bundles.PRIOR).read_bytes())
            if not finite(network):
                raise BadBundle(f"{bundle_dir} has weights that are no numbers; train again")
        except BadBundle:
            raise
        # safetensors, torch and Polars raise unrelated classes on damage, and panics are no Exceptions.
        except (Exception, pl.exceptions.PanicException) as exc:
            raise BadBundle(f"{bundle_dir} cannot be loaded: {exc}; train again") from exc
        return cls(network, tokenizer, config, words, device, novelty=novelty, prior=prior)

    @property
    def weights_mib(self) -> int:
        """The memory of the weights, rounded up."""
        weights = self.network.state_dict().values()
        return -(-sum(int(each.numel()) * int(each.element_size()) for each in weights) // 2**20)

    def on(self, device: str) -> "LineModel":
        """The same model with weights of its own on another device."""
        network = copy.deepcopy(self.network)
        return LineModel(
            network,
            self.tokenizer,
            self.config,
            self._words,
            device,
            novelty=self._novelty,
            prior=self._prior,
        )

    def score(self, masked: Sequence[str]) -> list[Evidence]:
        """One Evidence per masked line, in order."""
        return [
            evidence
            for at in range(0, len(masked), _AT_ONCE)
            for evidence in self._scored(masked[at : at + _AT_ONCE])
        ]

    def _scored(self, masked: Sequence[str]) -> Iterator[Evidence]:
        lines = self._lexicon.encode(masked)
        nats = self._surprisals(lines)
        count = len(masked)
        of = lines.line[lines.place[lines.scored]]
        tokens = np.bincount(of, minlength=count)
        surprisals = np.bincount(of, nats[lines.scored], count) / np.maximum(tokens, 1)
        worst = np.zeros(len(lines.words))  # nats of the most unlikely piece of each word
        np.maximum.at(worst, lines.place, nats)
        ends = np.searchsorted(lines.line, np.arange(count + 1)).tolist()
        nats_of, flags = worst.tolist(), lines.flags.tolist()
        severities = [severity_words(line) if may_be_severe(line) else None for line in masked]
        novelties = self._novelty.score(masked)
        priors = self._prior.score(masked, severities)
        for i, (begin, end) in enumerate(pairwise(ends)):
            unseen = [w for w in range(begin, end) if flags[w] & _UNSEEN]
            yield Evidence(
                surprisal=round(float(surprisals[i]), 4),
                words=_worst_words(lines.words[begin:end], nats_of[begin:end], flags[begin:end]),
                unseen=tuple(
                    word[:_WORD_CHARS]
                    for word in list(dict.fromkeys(_normal(lines.words[w]) for w in unseen))[:_UNSEEN_SHOWN]
                ),
                tokens=int(tokens[i]),
                severity=severities[i],
                novelty=novelties[i],
                prior=priors[i],
            )

    def _surprisals(self, lines: EncodedLines) -> Any:
        """Nats of every scored piece, (N,)."""
        if self.config.kind is NetworkKind.CAUSAL:
            return piece_surprisals(self.network, lines, self.device)
        from pipeline.models.encoder.network import masked_surprisals

        return masked_surprisals(self.network, lines, self.device)

    def _describe(self, word: str) -> int:
        """The flags of a word; the lexicon asks once."""
        text = self._masks.sub("", word) if self.tokenizer.opening in word else word
        if _LETTER.search(text) is None:  # masks and punctuation only
            return 0
        return _SAYS if _normal(word) in self._words else _SAYS | _UNSEEN


def _worst_words(words: Sequence[str], nats: Sequence[float], flags: Sequence[int]) -> tuple[str, ...]:
    """The words of a line with at least half of its highest surprisal, worst first."""
    least = max(0.5 * max(nats, default=0.0), 1e-9)
    near = [w for w in range(len(words)) if nats[w] >= least and flags[w] & _SAYS]
    near.sort(key=nats.__getitem__, reverse=True)
    return tuple(dict.fromkeys(words[w][:_WORD_CHARS] for w in near))[:_WORDS_SHOWN]
