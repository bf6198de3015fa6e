"""A question about stored results, in terms that every store understands."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from pipeline.records.levels import LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultQuery:
    """The newest `limit` records that match all of it. None and False match every record."""

    limit: int
    since: datetime | None = None  # at or after
    until: datetime | None = None  # before
    workloads: tuple[str, ...] | None = None  # their exact names
    level: str | None = None  # this one of LEVELS, or a graver one
    text: str | None = None  # stands in the message; upper and lower case are the same
    key: str | None = None  # stands as it is in the message or the raw text (OpenSearch: in the message)
    template_id: int | None = None
    anomalous: bool = False
    record_id: str | None = None
    before: tuple[datetime, str] | None = None  # older than this record, by time and then by id

    @property
    def end(self) -> datetime | None:
        """No record that matches is at or after it."""
        if self.before is None:
            return self.until
        last = self.before[0] + timedelta(microseconds=1)
        return last if self.until is None else min(last, self.until)

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that match."""
        return LEVELS if self.level is None else LEVELS[LEVELS.index(self.level) :]
