"""The tokenizer of a pretrained encoder, with the mask tokens of this log as single ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pipeline.errors import BadInput, LogweirError
from pipeline.models import bundle as bundles
from pipeline.models.encoder.directory import read_settings_json
from pipeline.models.tokenizer import LineTokenizer, Specials


class PretrainedTokenizer(LineTokenizer):
    """Cuts words as the encoder has learnt them; a word stands behind a space."""

    @classmethod
    def read(
        cls,
        directory: Path,
        *,
        tokens: Sequence[str],
        max_tokens: int,
        error: type[LogweirError] = BadInput,
    ) -> Self:
        """From `tokenizer.json` and `tokenizer_config.json`. Raises `error`."""
        from tokenizers import AddedToken, Tokenizer

        path = directory / bundles.TOKENIZER
        try:
            inner = Tokenizer.from_file(str(path))
        except Exception as exc:  # the binding raises bare Exception
            raise error(f"{path} is not a tokenizer: {exc}; save the fast tokenizer again") from exc
        inner.no_truncation()
        inner.no_padding()
        about = read_settings_json(directory / bundles.TOKENIZER_CONFIG, error)
        names = tuple(_text(about.get(f"{name}_token")) for name in Specials._fields)
        known = [inner.token_to_id(name) if name else None for name in names]
        ids = [number for number in known if number is not None]
        if len(ids) < len(known):
            raise error(
                f"{directory} does not name its {Specials._fields[known.index(None)]} token in "
                "tokenizer_config.json; save its tokenizer again"
            )
        new = [t for t in sorted(set(tokens)) if inner.token_to_id(t) is None]
        inner.add_tokens([AddedToken(t, normalized=False, special=False, lstrip=True) for t in new])
        if max(inner.get_vocab().values()) >= inner.get_vocab_size():
            raise error(f"{path} has ids past its {inner.get_vocab_size()} pieces; save the tokenizer again")
        found = cls(inner, sorted(set(tokens)), max_tokens)
        found.specials, found.special_names = Specials(*ids), names
        return found


def _text(token: Any) -> str:
    """A token of tokenizer_config.json: its text, or an object with it."""
    found = token.get("content", "") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""
