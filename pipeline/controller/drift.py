"""How far the stream has moved since a model version was new.

Three figures, each of a *window* of recent lines against the *reference*, the first day under the version:

* novelty: rise of the share of lines whose template is not in the training;
* unknown: rise of the share of words that are not in the training;
* score: the population stability index of the scores.

Novelty and scores belong to every line, because the verdict cache keeps both. Unknown words are counted only
when a line is scored, and a version scores each distinct line once. Its cache begins empty: the reference
counts every distinct line of its time, a later window only new ones. The share *among scored lines* thus
rises even on a stream that never changes. So the divisor is the number of words that an empty cache would
have scored in as many lines:

    unknown = unknown words of the window / max(scored words of the window,
                                                scored words of the reference scaled to the window)

Words that the cache hides count as known. On a stationary stream the chance of a first occurrence only falls,
so the expected figure never exceeds the reference: the measure errs towards silence. For the same reason a
window is never shorter than the reference: distinct lines grow slower than lines, so scaling *up* is safe.
The price: a stream that turns to much fewer distinct lines needs more unknown words to be noticed.

Commits add to sums per version, so a batch counts once however often it is delivered. Batches scored again
after the first model was published are not counted: that model was trained on them. `drift_counts.py` counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated, Any, Final

import msgspec

from pipeline.errors import BadPayload
from pipeline.records.wire import Codec

# One window: the share of a word that one line in a thousand has is known to a tenth.
WINDOW_LINES: Final = 20_000
REFERENCE: Final = timedelta(days=1)
BINS: Final = 10  # of the score, 0..1; deciles of the range, as is usual for a stability index
COUNTERS: Final = (
    "lines", "novel", "anomalous", "words", "unknown", *(f"bin{i}" for i in range(BINS)),
)  # fmt: skip
# Beyond so many standard errors of a difference, chance does not explain it. Lines come in bursts, so they
# tell as much as a fifth of them would if they were independent; what bursts more than that is left to the
# thresholds.
_ERRORS: Final = 3.0
_BURST: Final = 5.0
# Fewer words than one in so many lines are no share to speak of: a single odd line must not be drift.
_LINES_PER_WORD: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The result of `advance`. Shares are 0..1; `novelty` and `unknown` are rises (now - then) of at least 0.

    While not `ready` (the reference or the window is not full yet) the three figures are 0. A rise that
    chance alone explains is 0 too.
    """

    version: str
    ready: bool
    lines: int  # in the window; before that, lines seen under the version
    needed: int  # lines that the reference and the window need together
    novelty: float = 0.0
    unknown: float = 0.0
    score: float = 0.0
    novelty_now: float = 0.0
    novelty_then: float = 0.0
    unknown_now: float = 0.0
    unknown_then: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftWindow:
    """The state of `advance` between two calls, for one version. All values are sums since publication."""

    version: str
    began: Annotated[datetime, msgspec.Meta(tz=True)] | None = None  # when the version was first looked at
    reference: Mapping[str, int] | None = None  # the sums when the reference was full
    marks: tuple[Mapping[str, int], ...] = ()  # oldest first; the window reaches from the first one to now

    def __post_init__(self) -> None:
        stored = self.marks if self.reference is None else (self.reference, *self.marks)
        if any(not sums.keys() >= set(COUNTERS) for sums in stored):
            raise ValueError("a counter is missing")
        if (self.reference is None) != (not self.marks):
            raise ValueError("a reference needs marks, and marks a reference")


WINDOWS: Final = Codec(DriftWindow, version=1, what="a stored window of drift", newer=BadPayload)


def sums(stored: Mapping[str, Any]) -> dict[str, int]:
    """Every counter as a number, absent ones as 0. Raises ValueError for one that is no number."""
    return {name: int(stored.get(name, 0)) for name in COUNTERS}


def advance(
    state: DriftWindow | None, *, version: str, counters: Mapping[str, Any], drift_lines: int, now: datetime
) -> tuple[DriftWindow, Drift]:
    """One look at the sums of the live version. Pure.

    The lines of the first day, `drift_lines` at least, are the reference: a stream has jobs that run by night
    and hours without people. The window covers the latest lines: at least as many as the reference, at most
    half of that more, and what came between two looks. It slides by halves. Another version, or sums that
    have shrunk, start over. Raises ValueError for counters that are not numbers.
    """
    total = sums(counters)
    if state is None or state.version != version or _shrunk(total, state.marks):
        state = DriftWindow(version=version, began=now)
    if state.reference is None:
        if total["lines"] < drift_lines or state.began is None or now - state.began < REFERENCE:
            needed = 2 * max(drift_lines, total["lines"])
            return state, Drift(version=version, ready=False, lines=total["lines"], needed=needed)
        state = replace(state, reference=total, marks=(total,))
    reference = state.reference or total
    span = max(drift_lines, reference["lines"])
    marks = list(state.marks)
    if total["lines"] - marks[-1]["lines"] >= span / 2:
        marks.append(total)
    while len(marks) > 1 and total["lines"] - marks[1]["lines"] >= span:
        del marks[0]
    window = {name: total[name] - marks[0][name] for name in COUNTERS}
    state = replace(state, reference=reference, marks=tuple(marks))
    if window["lines"] < span:
        lines = reference["lines"] + window["lines"]
        needed = reference["lines"] + span
        return state, Drift(version=version, ready=False, lines=lines, needed=needed)
    return state, drift_between(reference, window, version=version)


def drift_between(reference: Mapping[str, int], window: Mapping[str, int], *, version: str) -> Drift:
    """The three figures of a full window against a full reference; both are differences of sums."""
    then, now = reference["lines"], window["lines"]
    words_then = max(reference["words"], then / _LINES_PER_WORD)
    words_now = max(window["words"], words_then * now / then)
    return Drift(
        version=version,
        ready=True,
        lines=now,
        needed=now,
        novelty=_rise(window["novel"], now, reference["novel"], then),
        unknown=_rise(window["unknown"], words_now, reference["unknown"], words_then),
        score=stability(
            [reference[f"bin{i}"] for i in range(BINS)], [window[f"bin{i}"] for i in range(BINS)]
        ),
        novelty_now=window["novel"] / now,
        novelty_then=reference["novel"] / then,
        unknown_now=min(1.0, window["unknown"] / words_now),
        unknown_then=min(1.0, reference["unknown"] / words_then),
    )


def stability(then: list[int], now: list[int]) -> float:
    """Population stability index of two histograms, 0 where chance explains it.

    PSI = sum over bins of (q - p) ln(q / p), the Jeffreys divergence of the two distributions. Credit scoring
    reads 0.1 as some and 0.25 as a major shift (Siddiqi, "Credit Risk Scorecards", 2006). Every bin gets half
    a line more (Jeffreys' prior), so that three lines in an empty bin are no alarm. For equal distributions
    PSI / (1/n + 1/m) is about chi-square with bins - 1 degrees of freedom (Yurdakul, "Statistical properties
    of population stability index", 2018). Below its mean plus three deviations, with n and m divided by the
    length of a burst, the index is 0. Bins that are empty on both sides do not count.
    """
    pairs = [(a, b) for a, b in zip(then, now, strict=True) if a or b]
    total_then, total_now = sum(then), sum(now)
    if len(pairs) < 2 or not total_then or not total_now:
        return 0.0
    index = 0.0
    for a, b in pairs:
        p = (a + 0.5) / (total_then + 0.5 * len(pairs))
        q = (b + 0.5) / (total_now + 0.5 * len(pairs))
        index += (q - p) * math.log(q / p)
    free = len(pairs) - 1
    chance = (free + _ERRORS * math.sqrt(2 * free)) * _BURST * (1 / total_then + 1 / total_now)
    return index if index > chance else 0.0


def _rise(now: int, of_now: float, then: int, of_then: float) -> float:
    """now/of_now - then/of_then, 0 where it is not above three standard errors.

    The error is that of Agresti and Caffo (2000), one success and one failure added to each side: it does not
    vanish for shares of 0, which are the usual ones here.
    """
    share_now, share_then = min(1.0, now / of_now), min(1.0, then / of_then)
    variance = 0.0
    for share, size in ((share_now, of_now), (share_then, of_then)):
        independent = size / _BURST
        p = (share * independent + 1) / (independent + 2)
        variance += p * (1 - p) / (independent + 2)
    rise = share_now - share_then
    return rise if rise > _ERRORS * math.sqrt(variance) else 0.0


def _shrunk(now: Mapping[str, int], marks: tuple[Mapping[str, int], ...]) -> bool:
    """Redis has lost the newest sums, or all of them."""
    return bool(marks) and any(now[name] < marks[-1][name] for name in COUNTERS)
