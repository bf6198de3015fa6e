"""Training requests from settings: what is asked when nobody says otherwise."""

from datetime import UTC, datetime, timedelta
from typing import Final

from pipeline.records.query import Query
from pipeline.settings import Settings

_ZERO: Final = datetime(1970, 1, 1, tzinfo=UTC)


def store_of(settings: Settings) -> str:
    """Where training data lies: by setting, or wherever results are stored first."""
    return settings.sinks[0] if settings.train_source == "results" else settings.train_source


def query_of(settings: Settings, now: datetime) -> Query:
    """The usual query: the last `train_span_s`, without what the settings exclude; its workloads come later."""
    return Query(
        store=store_of(settings),
        since=None if settings.train_span_s is None else begin_of(now, settings.train_span_s),
        exclude_words=settings.train_exclude_words,
        exclude_anomalous=settings.train_exclude_anomalous,
    )


def begin_of(now: datetime, span_s: float) -> datetime:
    """So far back, and up to a hundredth more: requests that follow each other are equal, and are merged."""
    step = timedelta(seconds=max(1.0, span_s / 100))
    begin = now - timedelta(seconds=span_s)
    return begin - (begin - _ZERO) % step
