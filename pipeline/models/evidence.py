"""The line model's evidence about lines, before a threshold turns it into verdicts."""

from dataclasses import dataclass

import msgspec


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one masked line. A struct is made in a fifth of a frozen dataclass's time."""

    surprisal: float  # Mean NLL in nats of the worst words; 0 for a line of mask tokens only.
    words: tuple[str, ...] = ()  # Whole words of the masked line, highest surprisal first.
    unseen: tuple[str, ...] = ()  # Words that no training line holds.
    tokens: int = 0  # Scored pieces.
    severity: str | None = None  # The error word found by `severity_words`.
    novelty: float = 0.0  # Mean share of grams that no training line holds (models/novelty.py).
    prior: float = 0.0  # Logit that a line of these words is an error (models/prior.py).


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """A normal line of a held-out template, measured as on its first appearance."""

    evidence: Evidence
    severe: bool = False  # at an error-like level

    @property
    def calm(self) -> bool:
        return not self.severe and self.evidence.severity is None
