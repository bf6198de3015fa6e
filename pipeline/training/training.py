"""From stored lines to a published model, or to a candidate with the reason why it was not published.

stored results --pages--> sample --split--> fit --> bundle --judge against the live model--> publish(fence) or keep

Where the lines come from is told by the query, which becomes part of the bundle's manifest. What was sent as a
baseline is learnt from instead of the results, where there is any.
"""

import json
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import polars as pl

from pipeline.controller.trainings import Request, State, Status
from pipeline.controller.watchlist import covers, model_of
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import Template
from pipeline.errors import BadBundle, LiveChanged, StaleToken, TrainingFailed
from pipeline.marks.marks import Mark, lesson
from pipeline.models import bundle
from pipeline.models.registry import Live, Note, Registry
from pipeline.models.threshold import Mode
from pipeline.records.batch import Purpose, digest
from pipeline.records.query import Query
from pipeline.redis.keys import SHARED
from pipeline.redis.leases import HeldLease
from pipeline.settings import Settings
from pipeline.sinks.choose import kind_of, root_of
from pipeline.training import judging, sampling
from pipeline.watching.sessions import keys as session_keys
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.sessions.model import dump as dump_session_models
from pipeline.watching.sessions.sampling import SessionSampler

# How the percents of a training are shared out: reading, fitting, judging.
_READ, _FIT = 10.0, 85.0
_SHOW_S = 0.3
_STREAM_PATTERNS = 2_000  # the judge shows some hundreds of them


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLines:
    """What a training reads: a query to one purpose's store."""

    query: Query
    purpose: Purpose
    settings: Settings

    def pages(self) -> Iterator[pl.DataFrame]:
        """LEARN_SCHEMA. Raises SourceUnavailable, BadPayload."""
        if self.query.store == "parquet":
            return sampling.read_parquet(root_of(self.settings, self.purpose), self.query)
        from pipeline.opensearch import client, documents, training

        return training.learn_pages(
            client.connect(self.settings),
            self.settings,
            self.query,
            index=documents.indices(self.settings, kind_of(self.purpose)),
        )

    def total(self) -> int:
        """How many records there are about, 0 when nobody knows without reading."""
        if self.query.store == "parquet":
            return 0
        from pipeline.opensearch import client, documents, training

        connection = client.connect(self.settings)
        return training.count(
            connection,
            self.settings,
            self.query,
            index=documents.indices(self.settings, kind_of(self.purpose)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Where a model is fitted, as torch names it, and an event that says when the right to be there is gone."""

    device: str = "cpu"
    lost: threading.Event | None = None


def chosen_workloads(
    request: Request, seen: Sequence[str], watched: Sequence[str], own: Sequence[str]
) -> tuple[str, ...]:
    """The workloads that a request means, of those seen. Own models learn from their workload alone.

    Without names: what is watched, or everything where nothing is; never what has a model of its own.
    """
    if request.workloads or request.patterns:
        named = set(request.workloads) | {w for w in seen if covers(request.patterns, w)}
        return tuple(sorted(named))
    if request.model != SHARED:
        return (request.model,)
    wanted = [w for w in seen if not watched or covers(watched, w)]
    return tuple(sorted(w for w in wanted if model_of(w, own) == SHARED))


def none_chosen(request: Request, watched: Sequence[str]) -> str:
    """What to say when a request means none of the workloads seen."""
    patterns = request.patterns or tuple(watched)
    if not patterns:
        return "every workload has a model of its own (own_models), so none is left for the shared one; name one to train"
    names = ", ".join(patterns[:5]) + (f" and {len(patterns) - 5} more" if len(patterns) > 5 else "")
    return (
        f"no workload with logs matches {names}; send logs first, or choose among those that "
        "`logweir watch list` shows"
    )


def lines_for(query: Query, settings: Settings) -> StoredLines:
    """The baseline of these workloads where each of them has one, else the results of all: nothing is left out."""
    baseline = StoredLines(
        query=replace(query, since=None, until=None), purpose=Purpose.BASELINE, settings=settings
    )
    missing = set(query.workloads)
    for page in baseline.pages():
        missing -= set(page["workload"].unique())
        if not missing:
            return baseline
    return StoredLines(query=query, purpose=Purpose.SCORE, settings=settings)


def train(
    request: Request,
    status: Status,
    lines: StoredLines,
    *,
    stream: StoredLines | None = None,
    masks: MaskSet,
    templates: Sequence[Template],
    registry: Registry,
    settings: Settings,
    held: HeldLease,
    marks: Sequence[Mark] = (),
    alone: Callable[[], AbstractContextManager[Workplace]] = lambda: nullcontext(Workplace()),
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Iterator[Status]:
    """Read, fit, judge, publish; yields what to show. The last status is COMPLETED, with the version.

    `stream`: all that the model will answer, where that is more than it learns from; a model that knows less than the
    live one about the rest is not to replace it unseen. `marks`: what people say of the lines now. `alone` gives us a
    device from the fit on: reading needs none.

    Raises TrainingFailed (no or too few lines), StaleToken (the lease was lost: nothing was published),
    SourceUnavailable (the store does not answer).
    """
    work = _Training(
        request=request, lines=lines, stream=stream, masks=masks, templates=templates, registry=registry,
        settings=settings, held=held, marks=marks, clock=clock, status=status,
    )  # fmt: skip
    sample = yield from work.read()
    held_out = judging.split(sample.frame, seed=settings.seed, mode=work.mode)
    recent = yield from work.answered(sample)
    with alone() as work.place:
        yield from work.fit(sample, held_out)
        yield from work.judge_and_publish(held_out, recent)


@dataclass(slots=True, kw_only=True)
class _Training:
    """One training on its way; `status` is what was shown last."""

    request: Request
    lines: StoredLines
    stream: StoredLines | None
    masks: MaskSet
    templates: Sequence[Template]
    registry: Registry
    settings: Settings
    held: HeldLease
    marks: Sequence[Mark]
    clock: Callable[[], datetime]
    status: Status
    place: Workplace = field(default_factory=Workplace)
    began: float = field(default_factory=time.monotonic)
    known_normal: frozenset[int] = frozenset()
    marked: int = 0  # patterns of the sample that somebody marked
    learnt: Mapping[str, SessionModel] = field(default_factory=dict)  # of each workload that has sessions

    @property
    def mode(self) -> Mode:
        return Mode.BASELINE if self.lines.purpose is Purpose.BASELINE else Mode.SELF

    def at(self, **changes: object) -> Status:
        """The next status to show. Raises StaleToken when the lease is lost."""
        if self.held.lost.is_set():
            token = self.held.lease.token
            raise StaleToken(f"the training lease (token {token}) was lost; nothing is published")
        if self.place.lost is not None and self.place.lost.is_set():
            raise StaleToken("the GPU was lost while training; nothing is published, it is tried again")
        self.status = replace(self.status, elapsed_s=time.monotonic() - self.began, **changes)  # type: ignore[arg-type]
        return self.status

    def read(self) -> Generator[Status, None, sampling.TrainingSample]:
        """The sample. Raises TrainingFailed when there is nothing to read."""
        yield self.at(state=State.FETCHING)
        sampler = self._sampler(self.settings.train_max_patterns)
        sessions = SessionSampler(
            timeout_s=self.settings.session_timeout_s,
            spotless=self.mode is not Mode.BASELINE,
            patterns=session_keys.user_patterns(self.settings.session_keys),
        )
        for read in _fed(sampler, self.lines, sessions):
            yield self.at(lines=read.lines, percent=round(_READ * read.share, 1))
        sample = sampler.sample()
        if sample.lines == 0:
            raise TrainingFailed(_nothing(self.lines.query, self.clock()))
        self.learnt = sessions.learn()
        taught = lesson(sample.frame, self.marks, sample.workloads)
        self.known_normal, self.marked = taught.known_normal, taught.marks
        return replace(sample, frame=taught.frame, left_out=sample.left_out + taught.left_out)

    def fit(self, sample: sampling.TrainingSample, held_out: judging.HeldOut) -> Iterator[Status]:
        """Fit and write the bundle; afterwards `status.version` names it."""
        from pipeline.models import trainer  # torch

        yield self.at(
            state=State.TRAINING,
            device=self.place.device,
            lines=sample.lines,
            patterns=sample.frame.height,
            percent=_READ,
            workloads=sample.workloads,
        )
        name = digest(self.status.request_id, str(sample.lines), self.masks.version)
        version = self.registry.name(self.held.lease.token, name)
        live = self.registry.current(self.request.model)
        for step in trainer.fit(
            sample.frame,
            tokens=self.masks.tokens,
            mask_version=self.masks.version,
            config=trainer.TrainConfig(),
            seed=self.settings.seed,
            out=self.registry.path(version),
            mode=self.mode,
            version=version,
            device=self.place.device,
            time_budget_s=self.settings.train_seconds,
            alerts_per_day=self.settings.alerts_per_day,
            parent=live.version if live else None,
            warm=self.registry.path(live.version) if live else None,
            held_out=held_out.patterns,
            known_normal=self.known_normal,
            model=self.request.model,
            workloads=tuple(sorted(sample.workloads)),
            query=self.lines.query.to_json() | {"purpose": self.lines.purpose.value, "marked": self.marked},
            extra={bundle.SEQUENCES: dump_session_models(self.learnt)} if self.learnt else {},
        ):
            yield self.at(
                percent=round(_READ + (_FIT - _READ) * step.percent / 100.0, 1),
                remaining_s=step.remaining_s or 0.0,
                epoch=int(step.epoch),
                loss=step.loss or 0.0,
            )
        if not self.registry.path(version).is_dir():
            raise TrainingFailed(f"the training of {version} ended without a model")
        yield self.at(state=State.JUDGING, percent=_FIT, version=version, remaining_s=0.0)

    def answered(self, sample: sampling.TrainingSample) -> Generator[Status, None, pl.DataFrame]:
        """What the model will answer, for the judge: the sample itself, or more where it learnt from less."""
        if self.stream is None:
            return sample.frame
        sampler = self._sampler(_STREAM_PATTERNS)
        for _ in _fed(sampler, self.stream):
            yield self.at()
        # What a mark answers is no matter of the model.
        return lesson(sampler.sample().frame, self.marks, sample.workloads).frame

    def judge_and_publish(self, held_out: judging.HeldOut, recent: pl.DataFrame) -> Iterator[Status]:
        """Judge against what is live now, and publish against that alone: when somebody moves the pointer meanwhile
        (a rollback, say), the question is another one."""
        version = self.status.version
        candidate = judging.Examinee.load(self.registry.path(version), **self._where)
        while True:
            live = self.registry.current(self.request.model)
            judgement = judging.judge(candidate, self._examinee(live), held_out, recent)
            figures = json.loads(judgement.to_json())
            if not judgement.passed:
                at = self.clock().isoformat()
                note = Note(state="candidate", reason=judgement.reason, at=at, judgement=figures)
                self.registry.write_note(version, note)
                yield self.at(state=State.COMPLETED, percent=100.0, reason=judgement.reason)
                return
            yield self.at(state=State.PUBLISHING, percent=99.0)
            generation = live.generation if live else 0
            try:
                self.registry.publish(
                    version, self.held.lease, at=self.clock(), judgement=figures, expected=generation
                )
            except LiveChanged:
                yield self.at(state=State.JUDGING, percent=_FIT)
                continue
            self.status = replace(self.status, state=State.COMPLETED, percent=100.0, published=True)
            yield self.status
            return

    @property
    def _where(self) -> dict[str, Any]:
        return {"device": self.place.device, "threads": self.settings.torch_threads}

    def _sampler(self, limit: int) -> sampling.Sampler:
        return sampling.Sampler(
            self.masks,
            limit=limit,
            templates=self.templates,
            seed=self.settings.seed,
            similarity=self.settings.drain_similarity,
            depth=self.settings.drain_depth,
        )

    def _examinee(self, live: Live | None) -> judging.Examinee | None:
        """The live model; one that cannot be read is no reason to keep a new one back."""
        if live is None:
            return None
        try:
            path = self.registry.path(live.version)
            return judging.Examinee.load(path, **self._where)
        except BadBundle:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    lines: int
    share: float  # 0..1 of what there is to read, 0 when unknown


def _fed(
    sampler: sampling.Sampler, lines: StoredLines, sessions: SessionSampler | None = None
) -> Iterator[_Read]:
    total, count, said = lines.total(), 0, 0.0
    for page in lines.pages():
        sampler.add(page)
        if sessions is not None:
            sessions.add(page)
        count += page.height
        if time.monotonic() - said > _SHOW_S:
            said = time.monotonic()
            yield _Read(lines=count, share=min(1.0, count / total) if total else 0.0)


def _nothing(query: Query, now: datetime) -> str:
    names = ", ".join(query.workloads[:5]) or "any workload"
    if len(query.workloads) > 5:
        names += f" and {len(query.workloads) - 5} more"
    if query.since is not None and query.since > now:
        return f"the time range begins at {query.since.isoformat()}, which lies in the future; no line can be in it"
    span = "" if query.since is None else f" since {query.since.isoformat()}"
    if query.until is not None:
        span += f" before {query.until.isoformat()}"
    return f"no line of {names} is stored{span}; send logs first, or choose another workload or time range"
