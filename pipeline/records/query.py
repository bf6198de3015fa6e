"""What a training reads: a question to a store that can be written down, merged with an equal one, and repeated."""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.batch import digest
from pipeline.records.schema import UTC_US
from pipeline.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Records of these workloads in this span, without what is excluded.

    `workloads` are exact names, never patterns, so that no name selects another one's logs; empty means all.
    Times are aware UTC and compared with the records' own; None leaves that end open. `until` is exclusive.
    `store` is where to look: "parquet" or "opensearch".
    """

    store: str = "parquet"
    workloads: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    exclude_words: tuple[str, ...] = ()  # whole records whose message holds one of them, upper or lower case
    exclude_anomalous: bool = False

    def to_json(self) -> dict[str, Any]:
        """What a manifest keeps."""
        times = {n: None if (t := getattr(self, n)) is None else t.isoformat() for n in ("since", "until")}
        return (
            asdict(self)
            | times
            | {"workloads": list(self.workloads), "exclude_words": list(self.exclude_words)}
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Raises BadPayload."""
        try:
            return cls(
                store=str(data["store"]),
                workloads=tuple(str(w) for w in data["workloads"]),
                since=None if data["since"] is None else datetime.fromisoformat(data["since"]),
                until=None if data["until"] is None else datetime.fromisoformat(data["until"]),
                exclude_words=tuple(str(w) for w in data["exclude_words"]),
                exclude_anomalous=bool(data["exclude_anomalous"]),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise BadPayload(f"a training query is not readable: {exc!r}") from exc

    @property
    def key(self) -> str:
        """Equal queries have equal keys."""
        return digest(json.dumps(self.to_json(), sort_keys=True))

    def selects(self) -> pl.Expr:
        """The same selection of a frame with the columns workload, timestamp, anomalous and message, for every store.

        A record without a time is in no span; one that is not judged yet is not anomalous. No word is ever a pattern,
        and the empty one is none.
        """
        wanted = pl.lit(value=True)
        if self.workloads:
            wanted &= pl.col("workload").is_in(list(self.workloads))
        if self.since is not None:
            wanted &= pl.col("timestamp") >= pl.lit(self.since.astimezone(UTC), dtype=UTC_US)
        if self.until is not None:
            wanted &= pl.col("timestamp") < pl.lit(self.until.astimezone(UTC), dtype=UTC_US)
        if self.exclude_anomalous:
            wanted &= ~pl.col("anomalous").fill_null(value=False)
        words = [word for word in self.exclude_words if word]
        for ascii_only in (True, False):
            some = [word for word in words if word.isascii() == ascii_only]
            if not some:
                continue
            # Lower-casing every message is the slow way, taken only where a word needs it.
            text = pl.col("message") if ascii_only else pl.col("message").str.to_lowercase()
            some = some if ascii_only else [word.lower() for word in some]
            found = text.str.contains_any(some, ascii_case_insensitive=ascii_only)
            wanted &= ~found.fill_null(value=False)
        return wanted


_ZERO: Final = datetime(1970, 1, 1, tzinfo=UTC)


def store_of(settings: Settings) -> str:
    """Where training data lies: by setting, or wherever results are stored first."""
    return settings.data.sinks[0] if settings.train.source == "results" else settings.train.source


def query_of(settings: Settings, now: datetime) -> Query:
    """The usual query: the last `train_span_s`, without what the settings exclude; its workloads come later."""
    return Query(
        store=store_of(settings),
        since=None if settings.train.span_s is None else begin_of(now, settings.train.span_s),
        exclude_words=settings.train.exclude_words,
        exclude_anomalous=settings.train.exclude_anomalous,
    )


def begin_of(now: datetime, span_s: float) -> datetime:
    """So far back, and up to a hundredth more: requests that follow each other are equal, and are merged."""
    step = timedelta(seconds=max(1.0, span_s / 100))
    begin = now - timedelta(seconds=span_s)
    return begin - (begin - _ZERO) % step
