"""Trainings: those that wait, run or ran; asking for one and cancelling one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import redis

from pipeline.controller.training_status import Status
from pipeline.controller.trainings import TrainingRequest, Trainings, documents_of, query_of
from pipeline.controller.watchlist import check_pattern, covers, model_of, unmatched
from pipeline.errors import BadInput
from pipeline.ledger.ledger import Ledger
from pipeline.messages.app import app_of
from pipeline.messages.submit import Submit
from pipeline.records.batch import utc_now
from pipeline.records.query import Query
from pipeline.redis.keys import SHARED
from pipeline.service.access.audit import record_change
from pipeline.settings import Settings
from pipeline.settings.train_source import TrainSource

MAX_TRAININGS = 200  # as many as are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingAsked:
    """A wanted training: of workloads that match, of a span, without lines that hold a word. `source`: log
    documents of OpenSearch in place of the lines of `train_source`."""

    workloads: Sequence[str] = ()
    since: datetime | None = None
    until: datetime | None = None
    exclude: Sequence[str] = ()
    source: TrainSource | None = None


def read_trainings(client: "redis.Redis", settings: Settings, limit: int = 20) -> list[Status]:
    """The newest first. Raises RedisUnavailable."""
    return Trainings(client, settings).recent(min(limit, MAX_TRAININGS))


def request_training(
    client: "redis.Redis", settings: Settings, asked: TrainingAsked, *, by: str, why: str = "logweir train"
) -> tuple[str, bool]:
    """Its id, and whether it is new. Raises BadInput, TrainingsFull, RedisUnavailable, and SourceUnavailable
    where documents cannot be counted."""
    check_encoder(settings)
    request = _request(asked, settings, sorted(Ledger(client, settings).backlog.totals()), why)
    _check_documents(request.query, settings)
    request_id, new = Trainings(client, settings).request(request)
    Submit(app_of(settings), client, settings).train(request_id)
    if new:
        record_change(
            client, settings, by=by, action="training.request", target=request_id, model=request.model
        )
    return request_id, new


def check_encoder(settings: Settings) -> None:
    """Raises BadInput for a directory of the setting `encoder` that no training could use."""
    if settings.train.encoder is not None:
        from pipeline.models.encoder.directory import encoder_shape  # Polars

        encoder_shape(settings.train.encoder)


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
    now = utc_now()
    query = query_of(settings, now)
    if asked.source is not None:
        query = replace(query, store="opensearch", documents=documents_of(settings, asked.source))
    nothing = [] if query.documents else unmatched(patterns, seen)
    if nothing:
        raise BadInput(f"no workload matches {nothing[0]!r}; `logweir status` shows those that have logs")
    query = replace(query, since=asked.since or query.since, until=asked.until or query.until)
    if query.since is not None and query.since > now:
        raise BadInput(f"since {query.since.isoformat()} lies in the future; no line can be in it")
    if query.since is not None and query.until is not None and query.since >= query.until:
        raise BadInput(
            f"since {query.since.isoformat()} is not before until {query.until.isoformat()}; exchange them"
        )
    if asked.exclude:
        query = replace(query, exclude_words=(*query.exclude_words, *asked.exclude))
    if query.documents is not None:
        # Documents may be of workloads that no line was sent of. A pattern means the shared model.
        model = patterns[0] if len(patterns) == 1 and not set("*?") & set(patterns[0]) else SHARED
        query = replace(query, documents=replace(query.documents, workloads=patterns))
        return TrainingRequest(model=model_of(model, settings.train.own_models), query=query, why=why)
    return TrainingRequest(model=_model_of(patterns, seen, settings), patterns=patterns, query=query, why=why)


def _check_documents(query: Query, settings: Settings) -> None:
    """Raises BadInput for a query that the server refuses or that selects nothing."""
    if query.documents is None:
        return
    from pipeline.opensearch.client import opensearch_client
    from pipeline.training.documents import count_documents

    if settings.opensearch.url is None:
        raise BadInput("OPENSEARCH_URL is not set; name the server, such as https://search.example:9200")
    client = opensearch_client(settings, reading=True)
    try:
        if not count_documents(client, query):
            raise BadInput(
                f"no document of {query.documents.index} is selected; give another index, query or time range"
            )
    finally:
        client.close()


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
