"""What the line model says of lines, before a threshold makes verdicts of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the model saw in one masked line.

    `surprisal` is the mean NLL in nats of the worst tokens (0 for a line of mask tokens only);
    `words` are whole words of the masked line, most surprising first; `unseen` are words that no
    training line holds; `tokens` counts the scored tokens; `severity` is the error word found by
    `severity_words`; `novelty` is the share of trigrams that no training line holds (models/novelty.py);
    `prior` is the logit that a line of such words is an error (models/prior.py). Both are 0 under a
    model that was made without them.
    """

    surprisal: float
    words: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    tokens: int = 0
    severity: str | None = None
    novelty: float = 0.0
    prior: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """A normal line of a held-out template, as it would be seen if it came for the first time."""

    evidence: Evidence
    severe: bool = False  # at an error-like level

    @property
    def calm(self) -> bool:
        return not self.severe and self.evidence.severity is None
