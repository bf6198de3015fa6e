"""The line model: the surprisal of a masked line, and the words that cause it.

A line's surprisal is the mean over its worst words. The surprisal of a word is that of its most unlikely
piece under a small causal transformer (models/causal.py). The network is trained from scratch on the distinct
lines of the sample. A mean over all words would hide one wrong word in a familiar sentence.
"""

import copy
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from pipeline.errors import BadBundle
from pipeline.models import bundle as bundles
from pipeline.models.causal import CausalCache, CausalNetwork, finite, piece_surprisals
from pipeline.models.config import ModelConfig, NetworkKind, model_config
from pipeline.models.encoder.pretrained import PretrainedTokenizer
from pipeline.models.evidence import Evidence
from pipeline.models.lexicon import EncodedLines, Lexicon
from pipeline.models.novelty import Novelty
from pipeline.models.prior import (
    OUTER_PUNCTUATION,
    WORDS_MOST,
    Ints,
    PieceMarks,
    SeverityPrior,
    Spoken,
    is_prose,
    prose_shares,
)
from pipeline.models.severity import severity_words
from pipeline.models.tokenizer import READ_CHARS, LineTokenizer

_AT_ONCE: Final = 2048  # lines; bounds what is encoded at a time
_WORDS_SHOWN: Final = 5
_UNSEEN_SHOWN: Final = 4 * _WORDS_SHOWN
_WORD_CHARS: Final = 64  # of a shown word; longer ones are blobs
_LETTER: Final = re.compile(r"[^\W_]")  # or digit
_SAYS, _UNSEEN, _SEVERE, _PROSE = 1, 2, 4, 8  # flags of a word in the lexicon
_COUNT: Final = 4  # bits below the number of its pieces for the prior

# Of all lines: surprisals in nats, numbers of scored pieces, words worst first.
Readings = tuple[list[float], list[int], list[list[str]]]


def loaded(config: ModelConfig, tokenizer: LineTokenizer, bundle: Path) -> Any:
    """The network of a verified bundle. Raises BadBundle, and what safetensors and torch raise on damage."""
    if config.kind is not NetworkKind.CAUSAL:
        from pipeline.models.encoder.files import loaded_encoder  # importing transformers takes seconds

        return loaded_encoder(config, tokenizer, bundle)
    weights = bundle / bundles.WEIGHTS
    # The weights would overwrite a random initialisation.
    with torch.device("meta"), _Uninitialised():
        network = CausalNetwork(config, tokenizer.vocab_size)
    _materialise(network)
    with weights.open("rb") as file:
        bundles.weights_header(file, weights.stat().st_size)
    absent, strange = network.load_state_dict(load_file(weights), strict=False)
    if strange or absent:
        raise BadBundle(f"{weights}: weights {sorted(absent)} are absent, {strange} unknown")
    return network


def bundle_tokenizer(config: ModelConfig, bundle: Path, *, tokens: tuple[str, ...]) -> LineTokenizer:
    """The tokenizer of a verified bundle. Raises BadBundle."""
    if config.kind is NetworkKind.PRETRAINED:
        return PretrainedTokenizer.read(bundle, tokens=tokens, max_tokens=config.max_tokens, error=BadBundle)
    return LineTokenizer.from_file(bundle / bundles.TOKENIZER, tokens=tokens, max_tokens=config.max_tokens)


def _materialise(network: torch.nn.Module) -> None:
    """As `to_empty(device="cpu")` for a network without buffers and tied weights, which imports sympy."""
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(
                module,
                name,
                torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")),
            )


class _Uninitialised(TorchFunctionMode):
    """Leaves out the functions of torch.nn.init. On the device "meta" they import torch._dynamo: 1.8 s."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


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
        self._cache = CausalCache(self.network) if config.kind is NetworkKind.CAUSAL else None
        self._spelt = PieceMarks()  # under the lexicon's lock
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
        out: list[Evidence] = []
        for at in range(0, len(masked), _AT_ONCE):
            part = masked[at : at + _AT_ONCE]
            lines = self._lexicon.encode(part)
            # Severity words may stand in the middle of a line that is too long to be read as a whole.
            severe = set(lines.line[lines.flags & _SEVERE > 0].tolist())
            severe |= {i for i, line in enumerate(part) if len(line) > READ_CHARS}
            severities = [severity_words(line) if i in severe else None for i, line in enumerate(part)]
            readings = _readings(lines, self._surprisals(lines), self.config)
            unseen = _by_line(lines, np.flatnonzero(lines.flags & _UNSEEN))
            novelties = self._novelty.score(part)
            priors = self._prior.score_spoken(part, severities, _spoken(lines))
            rows = zip(*readings, unseen, severities, novelties, priors, strict=True)
            out += [
                Evidence(
                    surprisal=round(surprisal, 4),
                    words=tuple(dict.fromkeys(words))[:_WORDS_SHOWN],
                    unseen=_unseen(new) if new else (),
                    tokens=tokens,
                    severity=severity,
                    novelty=novelty,
                    prior=prior,
                )
                for surprisal, tokens, words, new, severity, novelty, prior in rows
            ]
        return out

    def _surprisals(self, lines: EncodedLines) -> Any:
        """Nats of every scored piece, (N,)."""
        if self.config.kind is NetworkKind.CAUSAL:
            return piece_surprisals(self.network, lines, self.device, self._cache)
        from pipeline.models.encoder.network import masked_surprisals

        return masked_surprisals(self.network, lines, self.device)

    def _describe(self, words: Sequence[str]) -> tuple[Ints, Ints, Ints]:
        """The flags of words, and their marks for the prior; the lexicon asks once per word."""
        known, says = self._words, list(map(self._says, words))
        unseen = [said and _normal(word) not in known for word, said in zip(words, says, strict=True)]
        pieces, fails, marks, length = self._spelt.read(words)
        flags = _SAYS * np.array(says) | _UNSEEN * np.array(unseen) | _SEVERE * fails
        flags |= _PROSE * np.fromiter(map(is_prose, words), np.bool_, len(words))
        return flags | pieces << _COUNT, marks, length

    def _says(self, word: str) -> bool:
        """Whether a word holds more than masks and punctuation."""
        text = self._masks.sub("", word) if self.tokenizer.opening in word else word
        return _LETTER.search(text) is not None


def _spoken(lines: EncodedLines) -> Spoken:
    counts = lines.flags >> _COUNT
    pieces = np.bincount(lines.line, counts, len(lines.start) - 1).astype(np.int64)
    for i in np.flatnonzero(pieces > WORDS_MOST).tolist():
        at = slice(*np.searchsorted(lines.line, [i, i + 1]).tolist())
        pieces[i] = sum(dict(zip(lines.words[at], counts[at].tolist(), strict=True)).values())
    prose = prose_shares(lines.line, lines.flags & _PROSE > 0, len(pieces))
    return Spoken(line=lines.line[lines.marked], mark=lines.marks, pieces=pieces, prose=prose)


def _readings(lines: EncodedLines, surprisals: Any, config: ModelConfig) -> Readings:
    """Of each line: the mean of its worst words in nats, its scored pieces, and its words near the worst."""
    count = len(lines.start) - 1
    place, value = lines.place[lines.scored], surprisals[lines.scored].astype(np.float64)
    begins = np.flatnonzero(np.diff(place, prepend=-1))
    word = place[begins]  # words with a scored piece
    worst = np.maximum.reduceat(value, begins) if len(begins) else value
    order = np.lexsort((-worst, lines.line[word]))
    word, worst = word[order], worst[order]
    line = lines.line[word]
    words = np.bincount(line, minlength=count)
    first = np.cumsum(words) - words
    rank = np.arange(len(line)) - first[line]
    k = np.minimum(words, np.maximum(config.worst_least, np.ceil(config.worst_share * words)))
    top = rank < k[line]
    surprisal = np.bincount(line[top], weights=worst[top], minlength=count) / np.maximum(k, 1)
    pieces = np.bincount(lines.line[place], minlength=count)
    near_worst = (
        (worst >= 0.5 * worst[first[line]]) & (rank < 4 * _WORDS_SHOWN) & (lines.flags[word] & _SAYS > 0)
    )
    return surprisal.tolist(), pieces.tolist(), _by_line(lines, word[near_worst], _WORD_CHARS)


def _unseen(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(w[:_WORD_CHARS] for w in list(dict.fromkeys(map(_normal, words)))[:_UNSEEN_SHOWN])


def _by_line(lines: EncodedLines, chosen: Any, chars: int | None = None) -> list[list[str]]:
    """The beginnings of the chosen words (numbers in the order of lines) of each line."""
    words = [lines.words[word][:chars] for word in chosen.tolist()]
    ends = np.cumsum(np.bincount(lines.line[chosen], minlength=len(lines.start) - 1)).tolist()
    return [words[begin:end] for begin, end in pairwise([0, *ends])]
