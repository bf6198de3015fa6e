"""Values as the pages show them: times, ages, numbers, log text in pieces, reasons in sentences.

Log text is whatever somebody wrote: `visible` shows its control characters, and the templates escape it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from markupsafe import escape

from pipeline.records.batch import utc_now
from pipeline.report.why import reasons_in_words
from pipeline.service.values import Line
from pipeline.units import chance, clipped, plural, visible

MESSAGE: Final = 2_000  # characters of a message that are shown
CUTS: Final = (MESSAGE, 1_200, 750, 500, 300, 150, 60)
MESSAGES: Final = 80_000  # bytes of all messages of a page; 100 lines have as many of links and names
_HOLE: Final = re.compile(r"<(?:\*|[A-Z][A-Z0-9_]*)>")  # `<*>` and the masks, `<IP>`
_WORDS: Final = re.compile(r"“([^”]{1,200})”")
_LEVELS: Final = {"fatal": 3, "critical": 3, "error": 3, "warning": 2}


def number(value: float | None) -> str:
    """`1,234`, `2.1 M`; a dash for none."""
    if value is None:
        return "–"
    if value >= 10_000_000:
        return f"{value / 1e6:,.0f} M"
    if value >= 1_000_000:
        return f"{value / 1e6:.1f} M"
    return f"{value:,.0f}"


def share(value: float | None) -> str:
    """`12 %`, `<1 %`."""
    if value is None:
        return "–"
    return "<1 %" if 0 < value < 0.01 else f"{value:.0%}".replace("%", " %")


def score(value: float | None) -> str:
    """`0.93`; `warming` where no model has judged."""
    return "warming" if value is None else f"{value:.2f}"


def bytes_size(amount: float | None) -> str:
    """`12 MiB` of a number of bytes."""
    if amount is None:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:,.0f} {unit}"
        amount /= 1024
    return f"{amount:,.1f} GiB"


def times(change: float) -> str:
    """`3.2×`, `÷4` for how many times as frequent something is; `=` for as frequent."""
    if 0.95 <= change <= 1.05:
        return "="
    factor = change if change > 1 else 1 / max(change, 1e-9)
    text = f"{factor:,.0f}" if factor >= 10 else f"{factor:.1f}"
    return f"{text}×" if change > 1 else f"÷{text}"


def ago(at: datetime | None) -> str:
    """`4 min ago`, `in 3 h`; a dash for none."""
    if at is None:
        return "–"
    length = (utc_now() - at).total_seconds()
    text = length_of(abs(length))
    return f"{text} ago" if length >= 0 else f"in {text}"


def length_of(length_s: float) -> str:
    """`40 s`, `3 min`, `2 h`, `4 d`."""
    if length_s < 90:
        return f"{length_s:.0f} s"
    if length_s < 5_400:
        return f"{length_s / 60:.0f} min"
    return f"{length_s / 3_600:.0f} h" if length_s < 172_800 else f"{length_s / 86_400:.0f} d"


def moment_ms(ms: float) -> datetime:
    """The moment of milliseconds since 1970."""
    return datetime.fromtimestamp(ms / 1000, UTC)


def moment_iso(text: str) -> datetime:
    """The moment of a text in ISO 8601 that the pipeline wrote."""
    return datetime.fromisoformat(text)


def iso_time(at: datetime) -> str:
    """For `datetime=` and for addresses."""
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock_time(at: datetime, beside: datetime | None = None) -> str:
    """`09:12:33` today, `24 Nov 09:12:33` on another day. `beside`: the other end of a span.

    Where that lies on another day, today has its date too."""
    now = utc_now()
    year = f"{at:%Y} " if at.year != now.year else ""
    day = "" if at.date() == now.date() == (beside or now).date() else f"{at.day} {at:%b} {year}"
    return f"{day}{at:%H:%M:%S}"


def level_class(level: str | None) -> str:
    """The class of a level: s3 error-like, s2 a warning, s1 neither."""
    return f"s{_LEVELS.get(level or '', 1)}"


def severity_word(severity: int) -> str:
    """A severity in a word, for colour alone says nothing."""
    return {3: "error", 2: "warning"}.get(severity, "unusual")


def pieces(text: str, chars: int = MESSAGE) -> list[tuple[str, bool]]:
    """A template in pieces, True for its wildcards and masks."""
    shown = clipped(text, chars)
    return list(_pieces(shown, (match.span() for match in _HOLE.finditer(shown))))


def quoted_parts(text: str, chars: int = 400) -> list[tuple[str, bool]]:
    """A sentence in parts, True for what stands between backticks in it: texts of lines."""
    return [(part, at % 2 == 1) for at, part in enumerate(clipped(text, chars).split("`")) if part]


def why_scored(line: Line) -> str:
    """Why a line scored, in one sentence."""
    text = reasons_in_words(line.reasons or [], line.level, line.message or "")
    if not text:
        return ""
    p_value = line.p_value or 1.0
    rarity = f" One normal line in {1 / p_value:,.0f} is as unlikely." if p_value <= 0.01 else ""
    return f"{text[0].upper()}{text[1:]}.{rarity}"


def shown_chars(lines: Sequence[Line]) -> int:
    """So many characters of each message keep a page of these lines below 200 KB."""

    def weight(chars: int) -> int:
        return sum(len(escape(clipped(line.message or "", chars)).encode()) for line in lines)

    return next((chars for chars in CUTS if weight(chars) <= MESSAGES), CUTS[-1])


def message_pieces(line: Line, chars: int = MESSAGE) -> list[tuple[str, bool]]:
    """A message in pieces, True for the words that its reasons name."""
    text = clipped(line.message or "", chars)
    named = {word for match in _WORDS.finditer(why_scored(line)) if (word := match[1]) in text}
    if not named or not line.anomalous:
        return [(text, False)]
    pattern = "|".join(re.escape(word) for word in sorted(named, key=len, reverse=True))
    return list(_pieces(text, (match.span() for match in re.finditer(pattern, text))))


def sentence(text: str) -> str:
    """With a full stop, where it has no end of its own."""
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def trend_words(trend: Sequence[int]) -> str:
    """A trend in words: its peak and its end."""
    peak = max(trend, default=0)
    if not peak:
        return "Trend: no line"
    return f"Trend in {len(trend)} parts: at most {plural(peak, 'line')}, in part {trend.index(peak) + 1}; {trend[-1]:,} in the last"


def clip(text: str | None, chars: int = 200) -> str:
    """The visible text, cut."""
    return clipped(text or "", chars)


def _pieces(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    at = 0
    for start, end in spans:
        yield text[at:start], False
        yield text[start:end], True
        at = end
    yield text[at:], False


FILTERS: Final = (
    number, share, score, bytes_size, times, ago, length_of, iso_time, clock_time, level_class, severity_word, pieces,
    quoted_parts, why_scored, message_pieces, clip, sentence, trend_words, chance, visible, moment_ms, moment_iso,
)  # fmt: skip


def total(values: Sequence[Sequence[int]]) -> list[int]:
    """The sums of columns of equal length."""
    return [sum(column) for column in zip(*values, strict=True)]
