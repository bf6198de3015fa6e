"""Training requests and their states: a queue in Redis that survives every process.

    request --merge with an equal one--> queued --take--> fetching, training, judging, publishing
        publishing --> completed | failed(reason) | cancelled
        cancel: at once while queued, at the next step while running
        a dead trainer: the sweep ends its training as failed.
        It queues the training again, a bounded number of times and with a growing pause.

Invariants: one training runs at a time, by the holder of the `training` lease. Every script compares the
lease's token, so a trainer that lost the lease can neither report progress nor end a training.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, cast

import msgspec
import redis

from pipeline.controller.arguments import CancelArgs, EndArgs, RequestArgs, ShowArgs, TakeArgs
from pipeline.controller.facts import backoff_s
from pipeline.controller.training_status import Status, TrainingState
from pipeline.errors import BadInput, BadPayload, Cancelled, StaleToken, TrainingsFull
from pipeline.records.batch import digest
from pipeline.records.query import Documents, Query, begin_of
from pipeline.records.wire import Codec
from pipeline.records.written_levels import level_of
from pipeline.redis.arguments import named_arguments
from pipeline.redis.connection import answering, now_ms, text_map
from pipeline.redis.keys import SHARED, Keys
from pipeline.redis.leases import TRAINING, Lease
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings
from pipeline.settings.train_source import TrainSource, query_clause

ATTEMPTS: Final = 3  # of one request; a third death is no accident
KEEP_S: Final = 30 * 86_400
KEEP: Final = 200  # ended trainings remembered
# One for each of that many models. Equal requests merge, so more are a mistake.
MAX_WAITING: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """A wanted training of exact `workloads`, and of those that match `patterns` when it begins.

    Without either it covers all workloads that the model serves.
    """

    model: str = SHARED
    workloads: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    query: Query = field(default_factory=Query)  # its workloads are filled in when the training begins
    asked_by: str = "operator"  # "operator", "run" or "controller"
    why: str = ""  # a sentence for people
    answers: tuple[str, ...] = ()  # the controller's causes
    attempt: int = 1
    retry_of: str = ""

    @property
    def key(self) -> str:
        """Equal requests have equal keys, whoever asks and why."""
        return digest(self.model, *self.workloads, "", *self.patterns, self.query.key)


# A request that this build cannot read fails at once: no other trainer would take it.
REQUESTS: Final = Codec(TrainingRequest, version=1, what="a training request", newer=BadPayload)


class Trainings:
    """The queue. Every method raises RedisUnavailable."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self.backoff_s = settings.internal.retrain_backoff_s

    # ---- asking ----------------------------------------------------------------------------------

    def request(self, request: TrainingRequest) -> tuple[str, bool]:
        """(id, is it new): an equal request in the queue is the same training. Raises TrainingsFull."""
        new_id = uuid.uuid4().hex
        k = self.keys
        args = RequestArgs(
            request_id=new_id, key=request.key, request=REQUESTS.to_json(request), most=MAX_WAITING
        )
        keys = [k.training(new_id), k.training_queue, k.training_keys, k.trainings]
        answer = self.scripts.run("training/request", keys, [named_arguments(args)])
        if answer[0] == b"full":
            raise TrainingsFull(
                f"{int(answer[1]):,} trainings wait already, which is the limit; `logweir train --list` "
                "shows them, "
                "--cancel takes one out"
            )
        return answer[1].decode(), answer[0] == b"queued"

    def cancel(self, request_id: str) -> str:
        """ "cancelled" before it began, "asked" if the next step stops it. Raises BadInput after its end."""
        status = self.followed(request_id)  # a retry is the same training
        request_id = status.request_id
        k = self.keys
        answer = self.scripts.run(
            "training/cancel",
            [
                k.training(request_id),
                k.training_queue,
                k.training_keys,
                k.trainings,
                k.trainings_ended,
                k.events,
            ],
            [
                named_arguments(
                    CancelArgs(request_id=request_id, model=status.model, keep_s=KEEP_S, keep=KEEP)
                )
            ],
        ).decode()
        if answer in ("unknown", "ended"):
            word = "is not known" if answer == "unknown" else "has ended already"
            raise BadInput(
                f"training {request_id!r} {word}; `logweir train --list` shows those that wait or run"
            )
        return str(answer)

    def status(self, request_id: str) -> Status:
        """State NONE when it is not known."""
        with answering():
            entry = text_map(self.client.hgetall(self.keys.training(request_id)))
        return _status(request_id, entry)

    def followed(self, request_id: str) -> Status:
        """The status of a request, or of its last retry."""
        status = self.status(request_id)
        while status.retried_as:
            status = self.status(status.retried_as)
        return status

    def recent(self, limit: int = 20) -> list[Status]:
        """The newest first, whatever their state."""
        with answering():
            ids = _names(self.client.zrevrange(self.keys.trainings, 0, limit - 1))
        return self._statuses(ids)

    def active(self) -> list[Status]:
        """All that wait or run."""
        with answering():
            running = _text(self.client.get(self.keys.training_now))
            ids = _names(self.client.zrange(self.keys.training_queue, 0, -1))
        return [s for s in self._statuses([running, *ids] if running else ids) if not s.ended]

    def ended_after(self, number: int) -> list[tuple[int, Status]]:
        """(number, status) of those that ended after the one with this number, in the order they ended."""
        with answering():
            found = self.client.zrangebyscore(
                self.keys.trainings_ended, f"({number}", "+inf", withscores=True
            )
        numbers = {_text(name): int(score) for name, score in cast("list[tuple[bytes, float]]", found)}
        return [(numbers[s.request_id], s) for s in self._statuses(list(numbers))]

    def _statuses(self, ids: list[str]) -> list[Status]:
        pipe = self.client.pipeline(transaction=False)
        for request_id in ids:
            pipe.hgetall(self.keys.training(request_id))
        with answering():
            entries = pipe.execute()
        return [_status(i, text_map(e)) for i, e in zip(ids, entries, strict=True) if e]

    def now(self) -> Status:
        """The one that runs, else the next that waits, else the last that ended, else NONE."""
        with answering():
            running = _text(self.client.get(self.keys.training_now))
            waiting = _names(self.client.zrange(self.keys.training_queue, 0, 0))
        # Asked for by name: of many that wait the running one is not among the newest.
        for request_id in (running, *waiting):
            status = self.status(request_id)
            if status.running or status.state is TrainingState.QUEUED:
                return status
        return max(self.recent(), key=lambda s: s.ended_ms, default=Status())

    # ---- working ---------------------------------------------------------------------------------

    def due(self) -> int:
        """How many wait and may begin now."""
        with answering():
            return int(self.client.zcount(self.keys.training_queue, "-inf", now_ms(self.client)))

    def waited_s(self) -> float:
        """How long the next one might have begun, 0 where none may."""
        with answering():
            found = self.client.zrange(self.keys.training_queue, 0, 0, withscores=True)
            oldest = cast("list[tuple[bytes, float]]", found)
            return max(0.0, (now_ms(self.client) - oldest[0][1]) / 1000) if oldest else 0.0

    def take(self, lease: Lease) -> tuple[Status, TrainingRequest] | None:
        """The next that may begin, for the holder of the training lease; None without either."""
        k = self.keys
        while True:
            with answering():
                ids = _names(self.client.zrange(k.training_queue, 0, 0))
                before = _text(self.client.get(k.training_now))
            if not ids:
                return None
            args = TakeArgs(request_id=ids[0], holder=lease.holder, token=str(lease.token), before=before)
            answer = self.scripts.run(
                "training/take",
                [
                    k.training(ids[0]), k.training_queue, k.training_keys, k.lease(TRAINING), k.training_now,
                    k.training(before or "-"), k.events,
                ],
                [named_arguments(args)],
            ).decode()  # fmt: skip
            if answer == "gone":
                continue
            if answer != "taken":
                return None
            with answering():
                entry = text_map(self.client.hgetall(k.training(ids[0])))
            status = _status(ids[0], entry)
            try:
                return status, REQUESTS.from_json(entry["request"])
            except BadPayload as exc:  # no trainer can ever work on it
                self.end(replace(status, state=TrainingState.FAILED, reason=str(exc)), lease)

    def show(self, status: Status, lease: Lease) -> None:
        """Report progress. Raises Cancelled if an operator cancelled it, StaleToken without the lease."""
        args = ShowArgs(token=str(lease.token), state=status.state.value, status=_dump(status))
        keys = [self.keys.training(status.request_id)]
        answer = self.scripts.run("training/show", keys, [named_arguments(args)])
        if answer == b"cancel":
            raise Cancelled("an operator cancelled it")
        if answer == b"lost":
            raise StaleToken(
                f"training {status.request_id} was given to another process; nothing is published"
            )

    def end(self, status: Status, lease: Lease, *, retry: TrainingRequest | None = None) -> bool:
        """Write the last status; `retry` is queued again after a pause. False when it had ended already."""
        return self._end(status, retry, token=str(lease.token)) == "ended"

    def end_lost(self, *, published: Callable[[str], bool]) -> Status | None:
        """End the running training of a trainer that lost its lease or died, and queue it again.

        `published`: whether this version was made live. A trainer that died after that has done its work.
        None when no training runs.
        """
        with answering():
            request_id = _text(self.client.get(self.keys.training_now))
            if not request_id:
                return None
            entry = text_map(self.client.hgetall(self.keys.training(request_id)))
        status = _status(request_id, entry)
        if not status.running:
            return None
        try:
            request = REQUESTS.from_json(entry["request"])
        except BadPayload:
            request = TrainingRequest(attempt=ATTEMPTS)
        if status.version and published(status.version):
            completed = replace(status, state=TrainingState.COMPLETED, percent=100.0, published=True)
            return completed if self._end(completed, None, token="") == "ended" else None
        cancelled = bool(entry.get("cancel"))
        last = request.attempt >= ATTEMPTS
        more = (
            f", as {request.attempt - 1} times before; the log of train says why"
            if last
            else "; it is tried again"
        )
        ended = replace(
            status,
            state=TrainingState.CANCELLED if cancelled else TrainingState.FAILED,
            reason="an operator cancelled it"
            if cancelled
            else f"the trainer died while {status.state.value}{more}",
        )
        retry = None if cancelled or last else next_attempt(request, request_id)
        return ended if self._end(ended, retry, token="") == "ended" else None

    def _end(self, status: Status, retry: TrainingRequest | None, *, token: str) -> str:
        k = self.keys
        retry_id = uuid.uuid4().hex if retry else ""
        status = replace(status, retried_as=retry_id)
        pause_s = 0.0 if retry is None else backoff_s(retry.attempt - 1, self.backoff_s)
        args = EndArgs(
            request_id=status.request_id,
            token=token,
            state=status.state.value,
            status=_dump(status),
            model=status.model,
            version=status.version,
            published=status.published,
            reason=status.reason,
            keep_s=KEEP_S,
            keep=KEEP,
            retry_id=retry_id,
            retry_key=retry.key if retry else "",
            retry=REQUESTS.to_json(retry) if retry else "",
            pause_ms=int(pause_s * 1000),
        )
        answer = self.scripts.run(
            "training/end",
            [
                k.training(status.request_id), k.lease(TRAINING), k.training_now, k.training(retry_id or "-"),
                k.training_queue, k.training_keys, k.trainings, k.trainings_ended, k.events,
            ],
            [named_arguments(args)],
        )  # fmt: skip
        return str(answer.decode())


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def _names(values: Any) -> list[str]:
    return [_text(value) for value in values]


def next_attempt(request: TrainingRequest, request_id: str) -> TrainingRequest:
    """The same training, once more."""
    return replace(request, attempt=request.attempt + 1, retry_of=request_id)


_FROM_REQUEST: Final = ("model", "asked_by", "why", "answers", "attempt", "retry_of")
_MOMENTS: Final = ("created_ms", "started_ms", "ended_ms", "not_before_ms")


def _dump(status: Status) -> str:
    return msgspec.json.encode(status).decode()


def _status(request_id: str, entry: Mapping[str, str]) -> Status:
    """What the trainer wrote last, else what was asked for. Only the scripts write state and
    moments."""
    if not entry:
        return Status(request_id=request_id)
    status = Status()
    with suppress(BadPayload, KeyError):  # of a newer build: what can be read is shown
        request = REQUESTS.from_json(entry["request"])
        status = Status(**{name: getattr(request, name) for name in _FROM_REQUEST})
    with suppress(ValueError, KeyError):
        # The script that cancels writes only a reason.
        said = msgspec.json.decode(entry["status"])
        status = msgspec.convert(msgspec.to_builtins(status) | said, Status)
    word = entry.get("state", "")
    shown: dict[str, Any] = {name: int(entry.get(name) or 0) for name in _MOMENTS}
    shown["state"] = TrainingState(word) if word in set(TrainingState) else TrainingState.NONE
    return replace(status, request_id=request_id, retried_as=entry.get("retried_as", ""), **shown)


def store_of(settings: Settings) -> str:
    """Where training data lies: by setting, or wherever results are stored first."""
    source = TrainSource.parse(settings.train.source)
    return settings.data.sinks[0] if source.store == "results" else source.store


def query_of(settings: Settings, now: datetime) -> Query:
    """The usual query: the last `train_span_s` without the settings' exclusions; its workloads come later.

    Raises BadInput where the file with the query of `train_source` cannot be read."""
    source = TrainSource.parse(settings.train.source)
    return Query(
        documents=documents_of(settings, source) if source.index else None,
        store=store_of(settings),
        since=None if settings.train.span_s is None else begin_of(now, settings.train.span_s),
        exclude_words=settings.train.exclude_words,
        exclude_anomalous=settings.train.exclude_anomalous,
    )


def documents_of(settings: Settings, source: TrainSource, workloads: Sequence[str] = ()) -> Documents:
    """The documents of a source, read by the layout of the settings. Raises BadInput for a bad query file."""
    try:
        clause = query_clause(source.query) if source.query is not None else ""
    except ValueError as exc:
        raise BadInput(str(exc)) from exc
    levels = {word: level_of(word) for word in source.level_not}
    if unknown := [word for word, level in levels.items() if level is None]:
        raise BadInput(f"level {unknown[0]!r} is none; write those such as error,fatal")
    return Documents(
        index=source.index,
        query=clause,
        level_not=tuple(sorted({level for level in levels.values() if level})),
        workloads=tuple(workloads),
        fields=settings.opensearch.fields,
        workload_fields=settings.opensearch.workload_fields,
        headers=settings.opensearch.source is None,
    )
