"""From stored lines to a published model, or to a candidate with the reason why it was not published.

baselines, results --pages--> sample --> fit --> bundle --judge--> publish (fenced), or keep it

The query that selects the lines becomes part of the bundle's manifest. A workload with a baseline is learnt
from it and from none of its results, any other from its results. The manifest says which is which.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from pipeline.controller.training_status import Status, TrainingState
from pipeline.controller.trainings import TrainingRequest, query_of
from pipeline.controller.watchlist import covers, model_of
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import Template
from pipeline.errors import (
    BadBundle,
    BadInput,
    LiveChanged,
    StaleToken,
    TrainingFailed,
)
from pipeline.imports import uncollected
from pipeline.logs import logger
from pipeline.marks.marks import Mark, lesson
from pipeline.models import bundle
from pipeline.models.registry import Registry
from pipeline.records.batch import LearntFrom, Purpose, digest
from pipeline.records.query import Query
from pipeline.records.versions import Live, Note
from pipeline.redis.keys import SHARED
from pipeline.redis.leases import HeldLease
from pipeline.settings import Settings
from pipeline.sinks.choose import kind_of, parquet_of
from pipeline.training import judging, sampling
from pipeline.watching.sessions import keys as session_keys
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.sessions.model import dump as dump_session_models
from pipeline.watching.sessions.sampling import SessionSampler

if TYPE_CHECKING:
    from pipeline.models.fitting import TrainConfig
    from pipeline.training.documents import DocumentReader

# Percent after reading, and after fitting.
_READ, _FIT = 10.0, 85.0
_SHOW_S = 0.3  # between two reports
_STREAM_PATTERNS = 2_000  # the judge shows some hundreds of them


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLines:
    """A query to the store of one purpose."""

    query: Query
    purpose: Purpose
    settings: Settings

    def pages(self) -> Iterator[pl.DataFrame]:
        """LEARN_SCHEMA. Raises SourceUnavailable, BadPayload, TrainingFailed."""
        if self.query.documents is not None:
            yield from self.reader().pages()
        else:
            yield from self._results()

    def reader(self) -> "DocumentReader":
        """Of the documents."""
        from pipeline.opensearch import client
        from pipeline.training.documents import DocumentReader

        opened = client.opensearch_client(self.settings, reading=True)
        return DocumentReader(opened, self.query, zone=self.settings.intake.time_zone)

    def _results(self) -> Iterator[pl.DataFrame]:
        if self.query.store == "parquet":
            return sampling.read_parquet(parquet_of(self.settings, self.purpose), self.query)
        from pipeline.opensearch import client, training

        return training.learn_pages(
            client.opensearch_client(self.settings), self.settings, self.query, index=self._index()
        )

    def total(self) -> int | None:
        """Roughly how many records there are; None where only reading could tell."""
        if self.query.documents is not None:
            from pipeline.opensearch import client
            from pipeline.training.documents import count_documents

            return count_documents(client.opensearch_client(self.settings, reading=True), self.query)
        if self.query.store == "parquet":
            return None
        from pipeline.opensearch import client, training

        return training.count(
            client.opensearch_client(self.settings), self.settings, self.query, index=self._index()
        )

    def _index(self) -> str:
        from pipeline.opensearch import documents

        return documents.indices(self.settings, kind_of(self.purpose))


def load_fitting() -> None:
    """Imports torch, where it is installed; a fit without it says so.

    Its import holds the interpreter's lock for up to 2.2 s on a busy machine. No lease is renewed then."""
    with suppress(ImportError), uncollected():
        from pipeline.models import trainer  # noqa: F401


def results_query(settings: Settings, workloads: Sequence[str], now: datetime) -> Query:
    """The stored results of these workloads, for the judge of a training from documents."""
    usual = query_of(settings.replace(train_source="results"), now)
    return replace(usual, workloads=tuple(workloads))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """The device that a model is fitted on."""

    device: str = "cpu"  # as torch names it
    lost: threading.Event | None = None  # set when the lease on the device is lost


def chosen_workloads(
    request: TrainingRequest, stored: Sequence[str], watched: Sequence[str], own_models: Sequence[str]
) -> tuple[str, ...]:
    """The seen workloads that a request means. Own models learn from their workload alone.

    Without names: the watched workloads, or all where none is watched, without those that have an own model.
    """
    if request.workloads or request.patterns:
        named = set(request.workloads) | {w for w in stored if covers(request.patterns, w)}
        return tuple(sorted(named))
    if request.model != SHARED:
        return (request.model,)
    wanted = [w for w in stored if not watched or covers(watched, w)]
    return tuple(sorted(w for w in wanted if model_of(w, own_models) == SHARED))


def none_chosen(request: TrainingRequest, watched: Sequence[str]) -> str:
    """The reason for people why a request means none of the workloads seen."""
    patterns = request.patterns or tuple(watched)
    if not patterns:
        return (
            "every workload has a model of its own (own_models), so none is left for the shared one; "
            "name one to train"
        )
    names = ", ".join(patterns[:5]) + (f" and {len(patterns) - 5} more" if len(patterns) > 5 else "")
    return (
        f"no workload with logs matches {names}; send logs first, or choose among those that "
        "`logweir watch list` shows"
    )


@dataclass(slots=True, kw_only=True)
class Training:
    """One training."""

    request: TrainingRequest
    status: Status  # that was reported last
    query: Query  # of the lines to learn from; its span is that of results, for a baseline is of no time
    # All stored lines that the model will answer, where there are some. A model that knows less of them than
    # the live one must not replace it unseen.
    stream: Query | None = None
    masks: MaskSet
    templates: Sequence[Template]
    registry: Registry
    settings: Settings
    held: HeldLease  # the training lease
    marks: Sequence[Mark] = ()  # of the patterns, as of now
    # Lends a device from the fit on: reading needs none.
    alone: Callable[[], AbstractContextManager[Workplace]] = lambda: nullcontext(Workplace())
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    place: Workplace = field(default_factory=Workplace)
    began: float = field(default_factory=time.monotonic)
    known_normal: frozenset[int] = frozenset()
    baselines: set[str] = field(default_factory=set)  # workloads that were learnt from one
    marked: int = 0  # patterns of the sample that have a mark
    session_models: Mapping[str, SessionModel] = field(default_factory=dict)  # by workload

    def run(self) -> Iterator[Status]:
        """Reads, fits, judges, publishes; yields each status to report, at last COMPLETED with the version.

        Raises TrainingFailed (no or too few lines), StaleToken (the lease was lost: nothing was published),
        SourceUnavailable (the store does not answer).
        """
        sample = yield from self.read()
        recent = yield from self.answered(sample)
        with self.alone() as self.place:
            yield from self.fit(sample)
            yield from self.judge_and_publish(sample.frame, recent)

    def at(self, **changes: object) -> Status:
        """The next status to report. Raises StaleToken when the lease is lost."""
        if self.held.lost.is_set():
            token = self.held.lease.token
            raise StaleToken(f"the training lease (token {token}) was lost; nothing is published")
        if self.place.lost is not None and self.place.lost.is_set():
            raise StaleToken("the GPU was lost while training; nothing is published, it is tried again")
        elapsed_s = time.monotonic() - self.began
        self.status = replace(self.status, elapsed_s=elapsed_s, **changes)  # type: ignore[arg-type]
        return self.status

    def read(self) -> Generator[Status, None, sampling.TrainingSample]:
        """The sample. Raises TrainingFailed when there is nothing to read."""
        yield self.at(state=TrainingState.FETCHING)
        sampler = self._sampler(sampling.MAX_PATTERNS)
        if self.query.documents is not None:
            yield from self._read_documents(sampler)
        else:
            yield from self._read_stored(sampler)
        sample = sampler.sample()
        if sample.lines == 0:
            raise TrainingFailed(_no_lines(self.query, self.clock()))
        taught = lesson(sample.frame, self.marks, sample.workloads)
        self.known_normal, self.marked = taught.known_normal, taught.marks
        return replace(sample, frame=taught.frame, left_out=sample.left_out + taught.left_out)

    def _read_stored(self, sampler: sampling.Sampler) -> Iterator[Status]:
        """The baselines, then the results of the workloads that have none."""
        sessions = self._sessions()
        always = replace(self.query, since=None, until=None)
        for read in _fed(sampler, self._stored(always, Purpose.BASELINE), sessions, seen=self.baselines):
            yield self.at(lines=read.lines, percent=round(_READ / 2 * read.share, 1))
        before = sampler.lines
        rest = tuple(name for name in self.query.workloads if name not in self.baselines)
        if rest or not self.baselines:
            for read in _fed(sampler, self._stored(replace(self.query, workloads=rest)), sessions):
                yield self.at(lines=before + read.lines, percent=round(_READ / 2 * (1 + read.share), 1))
        self._learn_sessions(sessions)

    def _learn_sessions(self, sessions: SessionSampler) -> None:
        self.session_models = sessions.learn()
        self.status = replace(self.status, unjudged=tuple(sessions.unjudged))

    def _origin(self, workload: str) -> LearntFrom:
        """What the lines of a workload were."""
        if self.query.documents is not None:
            return LearntFrom.DOCUMENTS
        return LearntFrom.BASELINE if workload in self.baselines else LearntFrom.RESULTS

    def _stored(self, query: Query, purpose: Purpose = Purpose.SCORE) -> StoredLines:
        return StoredLines(query=query, purpose=purpose, settings=self.settings)

    def _read_documents(self, sampler: sampling.Sampler) -> Iterator[Status]:
        lines = self._stored(self.query)
        reader, total, reported = lines.reader(), lines.total(), 0.0
        for page in reader.pages():
            sampler.add(page)
            if time.monotonic() - reported > _SHOW_S:
                reported = time.monotonic()
                share = min(1.0, reader.documents / total) if total else 0.0
                yield self.at(lines=reader.documents, percent=round(_READ * share, 1))
        if reader.without_message:
            if reader.without_message == reader.documents:
                raise TrainingFailed(reader.explain_missing())
            logger().warning(
                "training.without_message", documents=reader.without_message, of=reader.documents
            )
        logger(request=self.status.request_id).info("training.documents_read", documents=reader.documents)

    def _sessions(self) -> SessionSampler:
        return SessionSampler(
            timeout_s=self.settings.watch.session_timeout_s,
            patterns=session_keys.user_patterns(self.settings.watch.session_keys),
        )

    def fit(self, sample: sampling.TrainingSample) -> Iterator[Status]:
        """Fits, writes the bundle and brings it into the store; afterwards `status.version` names it.

        Raises StoreUnavailable."""
        with uncollected():
            from pipeline.models import trainer  # torch

        yield self.at(
            state=TrainingState.TRAINING,
            device=self.place.device,
            lines=sample.lines,
            patterns=sample.frame.height,
            percent=_READ,
            workloads=sample.workloads,
            learnt_from={name: self._origin(name) for name in sample.workloads},
        )
        name = digest(self.status.request_id, str(sample.lines), self.masks.version)
        version = self.registry.name(self.held.lease.token, name)
        live = self.registry.current(self.request.model)
        request = trainer.FitRequest(
            tokens=self.masks.tokens,
            mask_version=self.masks.version,
            config=self._config(),
            seed=self.settings.train.seed,
            out=self.registry.path(version),
            version=version,
            device=self.place.device,
            news_per_day=self.settings.train.news_per_day,
            parent=live.version if live else None,
            known_normal=self.known_normal,
            model=self.request.model,
            workloads=tuple(sorted(sample.workloads)),
            learnt_from=self.status.learnt_from,
            query=self.query.to_json() | {"marked": self.marked},
            extra=(
                {bundle.SEQUENCES: dump_session_models(self.session_models)} if self.session_models else {}
            ),
        )
        with closing(trainer.fit(sample.frame, request)) as steps:
            for step in steps:
                yield self.at(
                    percent=round(_READ + (_FIT - _READ) * step.percent / 100.0, 1),
                    remaining_s=step.remaining_s or 0.0,
                    epoch=int(step.epoch),
                    loss=step.loss or 0.0,
                )
        if not self.registry.path(version).is_dir():
            raise TrainingFailed(f"the training of {version} ended without a model")
        self.registry.put(version)
        yield self.at(state=TrainingState.JUDGING, percent=_FIT, version=version, remaining_s=0.0)

    def _config(self) -> "TrainConfig":
        """How to fit the edition of the settings. Raises TrainingFailed for an encoder that is not usable."""
        with uncollected():
            from pipeline.models import trainer

        try:
            return trainer.edition_config(self.settings.train.edition, self.settings.train.encoder)
        except BadInput as exc:
            raise TrainingFailed(str(exc)) from exc

    def answered(self, sample: sampling.TrainingSample) -> Generator[Status, None, pl.DataFrame]:
        """The lines that the model will answer, for the judge: the sample, or `stream` where there is one."""
        if self.stream is None or self._learns(self.stream):
            return sample.frame
        sampler = self._sampler(_STREAM_PATTERNS)
        # Documents have no templates, by which sessions are learnt.
        sessions = self._sessions() if self.query.documents is not None else None
        for _ in _fed(sampler, self._stored(self.stream), sessions):
            yield self.at()
        if sessions is not None:
            self._learn_sessions(sessions)
        answered = sampler.sample()
        if not answered.lines:
            return sample.frame
        # Marks answer their patterns before the model is asked.
        return lesson(answered.frame, self.marks, sample.workloads).frame

    def _learns(self, stream: Query) -> bool:
        """Whether all results of the stream are in the sample."""
        stored = self.query.documents is None and not self.baselines
        return stored and set(stream.workloads) <= set(self.query.workloads)

    def judge_and_publish(self, sample: pl.DataFrame, recent: pl.DataFrame) -> Iterator[Status]:
        """Judges against the live version, then publishes by compare-and-set.

        A pointer that moved meanwhile (a rollback, say) means another live version: the candidate is judged
        again.
        """
        version = self.status.version
        candidate = judging.Examinee.load(self.registry.path(version), device=self.place.device)
        while True:
            live = self.registry.current(self.request.model)
            judgement = self._judged(candidate, live, sample, recent)
            figures = msgspec.to_builtins(judgement)
            if not judgement.passed:
                at = self.clock().isoformat()
                note = Note(state="candidate", reason=judgement.reason, at=at, judgement=figures)
                self.registry.write_note(version, note)
                yield self.at(state=TrainingState.COMPLETED, percent=100.0, reason=judgement.reason)
                return
            yield self.at(state=TrainingState.PUBLISHING, percent=99.0)
            generation = live.generation if live else 0
            try:
                self.registry.publish(
                    version, self.held.lease, at=self.clock(), judgement=figures, expected=generation
                )
            except LiveChanged:
                yield self.at(state=TrainingState.JUDGING, percent=_FIT)
                continue
            self.status = replace(self.status, state=TrainingState.COMPLETED, percent=100.0, published=True)
            yield self.status
            return

    def _judged(
        self, candidate: judging.Examinee, live: Live | None, sample: pl.DataFrame, recent: pl.DataFrame
    ) -> judging.Judgement:
        """The judgement, which says where there was a live model that could not be asked."""
        other = self._examinee(live)
        judgement = judging.judge(candidate, other, sample, recent, seed=self.settings.train.seed)
        if live is None or other is not None:
            return judgement
        unread = f"; the live model {live.version} cannot be read, so it could not serve as a measure"
        return replace(judgement, reason=judgement.reason + unread)

    def _sampler(self, limit: int) -> sampling.Sampler:
        return sampling.Sampler(
            self.masks,
            limit=limit,
            templates=self.templates,
            seed=self.settings.train.seed,
            similarity=self.settings.drain.similarity,
        )

    def _examinee(self, live: Live | None) -> judging.Examinee | None:
        """The live model; None where it cannot be read: a damaged version must not block its successor."""
        if live is None:
            return None
        try:
            return self.registry.read(
                live.version, lambda path: judging.Examinee.load(path, device=self.place.device)
            )
        except BadBundle:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    lines: int
    share: float  # 0..1 of all lines, 0 when unknown


def _fed(
    sampler: sampling.Sampler,
    lines: StoredLines,
    sessions: SessionSampler | None = None,
    *,
    seen: set[str] | None = None,
) -> Iterator[_Read]:
    """Reads the lines to their end; `seen` gets the names of their workloads."""
    total, count, reported = lines.total(), 0, 0.0
    baseline = lines.purpose is Purpose.BASELINE
    for page in lines.pages():
        sampler.add(page, baseline=baseline)
        if sessions is not None:
            sessions.add(page, baseline=baseline)
        if seen is not None:
            seen.update(page["workload"].drop_nulls().unique())
        count += page.height
        if time.monotonic() - reported > _SHOW_S:
            reported = time.monotonic()
            yield _Read(lines=count, share=min(1.0, count / total) if total else 0.0)


def _no_lines(query: Query, now: datetime) -> str:
    if query.documents is not None:
        return (
            f"no document of {query.documents.index} is selected by the query, the levels, the workloads and "
            "the time range; give others"
        )
    names = ", ".join(query.workloads[:5]) or "any workload"
    if len(query.workloads) > 5:
        names += f" and {len(query.workloads) - 5} more"
    if query.since is not None and query.since > now:
        return (
            f"the time range begins at {query.since.isoformat()}, which lies in the future; "
            "no line can be in it"
        )
    span = "" if query.since is None else f" since {query.since.isoformat()}"
    if query.until is not None:
        span += f" before {query.until.isoformat()}"
    return f"no line of {names} is stored{span}; send logs first, or choose another workload or time range"
