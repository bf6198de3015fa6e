"""Trainings: those that wait, run or ran; asking for one and cancelling one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import redis

from pipeline.controller.training_status import Status
from pipeline.controller.trainings import TrainingRequest, Trainings, query_of
from pipeline.controller.watchlist import check_pattern, covers, model_of, unmatched
from pipeline.errors import BadInput
from pipeline.ledger.ledger import Ledger
from pipeline.messages.app import app_of
from pipeline.messages.submit import Submit
from pipeline.records.batch import utc_now
from pipeline.redis.keys import SHARED
from pipeline.service.access.audit import record_change
from pipeline.settings import Settings

MAX_TRAININGS = 200  # as many as are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingAsked:
    """A wanted training: of workloads that match, of a span, without lines that hold a word."""

    workloads: Sequence[str] = ()
    since: datetime | None = None
    until: datetime | None = None
    exclude: Sequence[str] = ()


def read_trainings(client: "redis.Redis", settings: Settings, limit: int = 20) -> list[Status]:
    """The newest first. Raises RedisUnavailable."""
    return Trainings(client, settings).recent(min(limit, MAX_TRAININGS))


def request_training(
    client: "redis.Redis", settings: Settings, asked: TrainingAsked, *, by: str, why: str = "logweir train"
) -> tuple[str, bool]:
    """Its id, and whether it is new. Raises BadInput, TrainingsFull, RedisUnavailable."""
    request = _request(asked, settings, sorted(Ledger(client, settings).backlog.totals()), why)
    request_id, new = Trainings(client, settings).request(request)
    Submit(app_of(settings), client, settings).train(request_id)
    if new:
        record_change(
            client, settings, by=by, action="training.request", target=request_id, model=request.model
        )
    return request_id, new


def cancel_training(
    client: "redis.Redis", settings: Settings, request_id: str, *, by: str
) -> tuple[str, str]:
    """The id of the training, and "cancelled" or "asked". Without an id: the one that waits or runs.

    Raises BadInput, RedisUnavailable."""
    trainings = Trainings(client, settings)
    now = trainings.now()
    request_id = request_id or ("" if now.ended else now.request_id)
    if not request_id:
        raise BadInput("no training waits or runs, so there is nothing to cancel")
    answer = trainings.cancel(request_id)
    record_change(client, settings, by=by, action="training.cancel", target=request_id)
    return request_id, answer


def _request(asked: TrainingAsked, settings: Settings, seen: list[str], why: str) -> TrainingRequest:
    patterns = tuple(check_pattern(p) for p in asked.workloads)
    nothing = unmatched(patterns, seen)
    if nothing:
        raise BadInput(f"no workload matches {nothing[0]!r}; `logweir status` shows those that have logs")
    now = utc_now()
    query = query_of(settings, now)
    query = replace(query, since=asked.since or query.since, until=asked.until or query.until)
    if query.since is not None and query.since > now:
        raise BadInput(f"since {query.since.isoformat()} lies in the future; no line can be in it")
    if query.since is not None and query.until is not None and query.since >= query.until:
        raise BadInput(
            f"since {query.since.isoformat()} is not before until {query.until.isoformat()}; exchange them"
        )
    if asked.exclude:
        query = replace(query, exclude_words=(*query.exclude_words, *asked.exclude))
    return TrainingRequest(model=_model_of(patterns, seen, settings), patterns=patterns, query=query, why=why)


def _model_of(patterns: tuple[str, ...], seen: list[str], settings: Settings) -> str:
    """Whose model is to be trained. Raises BadInput when the names mean more than one."""
    if not patterns:
        return SHARED
    named = [w for w in seen if covers(patterns, w)]
    own_models = [w for w in named if model_of(w, settings.train.own_models) != SHARED]
    if not own_models:
        return SHARED
    if len(named) == 1:
        return own_models[0]
    raise BadInput(
        f"{own_models[0]!r} has a model of its own and is trained alone; name it alone, or only workloads "
        "that share theirs"
    )
