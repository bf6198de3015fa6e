"""The file of a bundle that says which patterns its training saw, and how often."""

from collections.abc import Set
from pathlib import Path
from typing import Any, Final

import polars as pl

from pipeline.errors import BadBundle
from pipeline.models.bundle import KNOWN_FILE, SENTENCES
from pipeline.models.known.sentences import Sentences

KNOWN_SCHEMA: Final[dict[str, Any]] = {
    "pattern_id": pl.UInt64,
    "count": pl.UInt64,
    "template_id": pl.Int64,
    "severe": pl.Boolean,
    "baseline": pl.Boolean,  # people declared the pattern normal
}
_KNOWN_CAP: Final = 5_000_000  # patterns; a hundred times the largest sample


class KnownPatterns:
    """The occurrences of each pattern and template in the training sample, and what its lines said.

    `sentences`: None for a bundle of a build that did not keep them."""

    def __init__(self, frame: pl.DataFrame, sentences: Sentences | None = None) -> None:
        self.sentences = sentences
        self._counts: dict[int, int] = dict(frame.select("pattern_id", "count").iter_rows())
        self._template_of: dict[int, int] = dict(frame.select("pattern_id", "template_id").iter_rows())
        severe = frame.filter(pl.col("severe"))
        self._severe_patterns = frozenset(severe["pattern_id"].to_list())
        self._severe = frozenset(severe["template_id"].to_list())
        declared = frame.filter(pl.col("baseline"))
        self._baseline_patterns = frozenset(declared["pattern_id"].to_list())
        self._baseline_templates = frozenset(declared["template_id"].to_list())
        by_template = frame.group_by("template_id").agg(pl.col("count").sum())
        self._templates: dict[int, int] = dict(by_template.iter_rows())

    def without(self, patterns: Set[int], templates: Set[int]) -> "KnownPatterns":
        """The same, as if training had not seen these patterns and templates."""
        rows = [
            (
                pattern,
                count,
                template,
                pattern in self._severe_patterns,
                pattern in self._baseline_patterns,
            )
            for pattern, count in self._counts.items()
            if pattern not in patterns and (template := self._template_of[pattern]) not in templates
        ]
        return KnownPatterns(pl.DataFrame(rows, schema=KNOWN_SCHEMA, orient="row"), self.sentences)

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, pattern_id: object) -> bool:
        return pattern_id in self._counts

    def count(self, pattern_id: int, *, severe: bool = False) -> int:
        """Occurrences of the pattern in training; as `severe`, 0 where all of them were calm."""
        if severe and pattern_id not in self._severe_patterns:
            return 0
        return self._counts.get(pattern_id, 0)

    def template_of(self, pattern_id: int) -> int | None:
        """The template of the pattern in training."""
        return self._template_of.get(pattern_id)

    def template_count(self, template_id: int | None) -> int:
        """Occurrences of the template in training; 0 for None, which is no template."""
        return 0 if template_id is None else self._templates.get(template_id, 0)

    def template_severe(self, template_id: int) -> bool:
        """Whether training saw a line of the template at an error-like level."""
        return template_id in self._severe

    def in_baseline(self, pattern_id: int) -> bool:
        """Whether the pattern came in a baseline."""
        return pattern_id in self._baseline_patterns

    def template_in_baseline(self, template_id: int) -> bool:
        """Whether a line of the template came in a baseline."""
        return template_id in self._baseline_templates


def load_known(bundle: Path) -> KnownPatterns:
    """The training patterns of a bundle that `load_manifest` has verified. Raises BadBundle."""
    try:
        frame = pl.read_parquet(bundle / KNOWN_FILE, n_rows=_KNOWN_CAP + 1)
    # Polars raises several unrelated classes on damaged files, and its panics do not derive from Exception.
    except (Exception, pl.exceptions.PanicException) as exc:
        raise BadBundle(f"{bundle / KNOWN_FILE} is not readable: {exc}; publish the bundle again") from exc
    if dict(frame.schema) != KNOWN_SCHEMA:
        raise BadBundle(f"{bundle / KNOWN_FILE} has columns {dict(frame.schema)}, expected {KNOWN_SCHEMA}")
    if frame.height > _KNOWN_CAP or any(frame.null_count().row(0)):
        raise BadBundle(
            f"{bundle / KNOWN_FILE} has empty fields or more than {_KNOWN_CAP:,} patterns; publish it again"
        )
    said = bundle / SENTENCES
    return KnownPatterns(frame, Sentences.read(said) if said.exists() else None)
