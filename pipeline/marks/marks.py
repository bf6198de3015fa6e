"""Marks: a person declares a pattern or a template normal or anomalous, whatever a model says.

Marks are applied to verdicts where a batch is stored, and never enter the verdict cache. So a mark holds from
the next batch on, under every model version; once it is revoked or has expired, the answer of the model
counts again. Warming lines and baselines have no verdict, so no mark applies to them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final, Self

import msgpack
import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.verdict import Reason, reason

MARK_VERSION: Final = 1
_ANY_TIME: Final = datetime.min.replace(tzinfo=UTC)  # before every end


class State(StrEnum):
    """The declaration of a mark."""

    NORMAL = "normal"
    ANOMALOUS = "anomalous"


class Kind(StrEnum):
    """The scope of a mark: one masked line, or all lines of a template. Template ids below -1 are findings of
    sessions and rates (watching/rows.py)."""

    PATTERN = "pattern"
    TEMPLATE = "template"


# Where a row of lines says that it is one of them.
_COLUMN: Final = {Kind.PATTERN: "pattern_id", Kind.TEMPLATE: "template_id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The lines that are meant."""

    kind: Kind
    number: int  # pattern_id or template_id

    @classmethod
    def pattern(cls, pattern_id: int) -> Self:
        return cls(kind=Kind.PATTERN, number=pattern_id)

    @classmethod
    def template(cls, template_id: int) -> Self:
        return cls(kind=Kind.TEMPLATE, number=template_id)

    @property
    def of_lines(self) -> bool:
        """False for what was found in sessions or rates."""
        return self.kind is Kind.PATTERN or self.number > 0

    def __str__(self) -> str:
        """As it is written on a command line."""
        return f"T{self.number}" if self.kind is Kind.TEMPLATE else str(self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The declaration of a person about some lines, with its end."""

    target: Target
    state: State
    text: str  # the masked line, or the template as it was then
    workload: str = ""  # "": every workload
    at: datetime
    until: datetime | None = None  # None: until it is revoked
    by: str = ""
    why: str = ""

    def holds(self, now: datetime) -> bool:
        """False once it has run out."""
        return self.until is None or now < self.until

    @property
    def reason(self) -> str:
        """The reason that a line carries because of it."""
        return reason(Reason.MARKED, f"{self.state} by {self.by or 'somebody'}")

    def pack(self) -> bytes:
        """msgpack of version and fields; whom it is about stands in the name of its field."""
        until = None if self.until is None else _ms(self.until)
        fields = [MARK_VERSION, self.state.value, self.text, _ms(self.at), until, self.by, self.why]
        return bytes(msgpack.packb(fields))

    @classmethod
    def unpack(cls, target: Target, workload: str, blob: bytes) -> Self:
        """Raises BadPayload; a mark of a newer build is one too: this build cannot tell what it says."""
        try:
            version, *values = msgpack.unpackb(blob)
            if version > MARK_VERSION:
                raise BadPayload(
                    f"the mark of {target} has wire version {version}; this build reads up to "
                    f"{MARK_VERSION}: update it"
                )
            state, text, at_ms, until_ms, by, why = values
            if not all(isinstance(value, str) for value in (text, by, why)):
                raise TypeError("its fields have other types")
            until = None if until_ms is None else moment(until_ms)
            return cls(
                target=target,
                state=State(state),
                text=text,
                workload=workload,
                at=moment(at_ms),
                until=until,
                by=by,
                why=why,
            )
        except (ValueError, TypeError, OverflowError, OSError, msgpack.UnpackException) as exc:
            raise BadPayload(f"the stored mark of {target} is not readable: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """All marks at one moment, those that ran out lately too."""

    version: str = ""  # another one after every change
    now: datetime  # on Redis' clock
    marks: tuple[Mark, ...] = ()  # newest last
    unreadable: tuple[str, ...] = ()  # why: of a newer build, or damaged

    @property
    def holding(self) -> tuple[Mark, ...]:
        return tuple(mark for mark in self.marks if mark.holds(self.now))


class Overlay:
    """Marks prepared for columns of verdicts. The narrowest mark of a line counts: a pattern before its
    template, and of one target the mark for the workload before the mark for all.

    A batch has thousands of distinct lines, and there may be thousands of marks, so all work is columnar.
    """

    def __init__(self, marks: Iterable[Mark] = ()) -> None:
        several: dict[tuple[Kind, str], dict[int, Mark]] = {}
        for mark in marks:
            several.setdefault((mark.target.kind, mark.workload), {})[mark.target.number] = mark
        self._said = {about: _frame(about[0], found.values()) for about, found in several.items()}

    def __bool__(self) -> bool:
        """Whether there is a mark."""
        return bool(self._said)

    def among(self, rows: pl.DataFrame, workload: str, now: datetime) -> pl.DataFrame:
        """`anomalous` and `reason` of the mark that counts for each of those rows (columns pattern_id,
        template_id), null where there is none."""
        nothing = {"anomalous": pl.lit(None, pl.Boolean), "reason": pl.lit(None, pl.String)}
        found = rows.select("pattern_id", "template_id", **nothing)
        for kind in (Kind.PATTERN, Kind.TEMPLATE):
            for whose in dict.fromkeys((workload, "")):
                overrides = self._said.get((kind, whose))
                if overrides is None:
                    continue
                holding = overrides.filter(pl.col("until").is_null() | (pl.col("until") > _ms(now)))
                found = found.join(holding, on=_COLUMN[kind], how="left", maintain_order="left").select(
                    "pattern_id",
                    "template_id",
                    anomalous=pl.coalesce("anomalous", "anomalous_right"),
                    reason=pl.coalesce("reason", "reason_right"),
                )
        return found.select("anomalous", "reason")

    def normal(self, template_ids: Iterable[int], workload: str, now: datetime) -> frozenset[int]:
        """The templates among these that are marked as normal."""
        ids = pl.Series("template_id", list(template_ids), dtype=pl.Int64)
        overrides = self.among(ids.to_frame().with_columns(pattern_id=pl.lit(None, pl.UInt64)), workload, now)
        return frozenset(ids.filter(~overrides["anomalous"].fill_null(value=True)).to_list())

    def over(self, work: pl.DataFrame, workload: str, now: datetime) -> pl.DataFrame:
        """Judged rows (WORK_SCHEMA of detect.py) as people see them; `work` itself where no mark is about
        any.

        The p-value and the model's reasons stay: they are what the model overrides.
        """
        if not self._said:
            return work
        judged = work.filter(pl.col("score").is_not_null())
        overrides = self.among(judged, workload, now)
        if overrides["anomalous"].null_count() == overrides.height:
            return work
        overrides = (
            judged.select("key", "reasons")
            .with_columns(overrides)
            .filter(pl.col("anomalous").is_not_null())
            .select(
                "key",
                pl.col("anomalous").cast(pl.Float64).alias("score"),
                "anomalous",
                pl.concat_list("reason", "reasons").alias("reasons"),
            )
        )
        return work.update(overrides, on="key", how="left")


def _frame(kind: Kind, marks: Iterable[Mark]) -> pl.DataFrame:
    """The marks of one kind and workload by number; `until` in milliseconds since 1970."""
    rows = [(m.target.number, m.until and _ms(m.until), m.state is State.ANOMALOUS, m.reason) for m in marks]
    number = pl.UInt64 if kind is Kind.PATTERN else pl.Int64
    schema = {_COLUMN[kind]: number, "until": pl.Int64, "anomalous": pl.Boolean, "reason": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A training sample after what people overrides of it."""

    frame: pl.DataFrame
    known_normal: frozenset[int] = (
        frozenset()
    )  # pattern ids to be learnt however rare or error-like they look
    left_out: int = 0  # records of patterns that are anomalous and taught to nobody
    marks: int = 0  # patterns of the sample that a mark was about


def lesson(sample: pl.DataFrame, marks: Sequence[Mark], workloads: Iterable[str]) -> Lesson:
    """The part of a sample (SAMPLE_SCHEMA) that a model may learn from, by marks that hold.

    A mark for one workload counts only where the sample has that workload alone: a model of several workloads
    would apply it to all of them."""
    names = set(workloads)
    overrides = Overlay(marks).among(sample, names.pop() if len(names) == 1 else "", _ANY_TIME)["anomalous"]
    bad, good = overrides.fill_null(value=False), (~overrides).fill_null(value=False)
    return Lesson(
        frame=sample.filter(~bad) if bad.any() else sample,
        known_normal=frozenset(sample["pattern_id"].filter(good).to_list()),
        left_out=int(sample["count"].filter(bad).sum()),
        marks=overrides.len() - overrides.null_count(),
    )


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def moment(ms: int) -> datetime:
    """Milliseconds since 1970 as a time."""
    return datetime.fromtimestamp(ms / 1000, UTC)
