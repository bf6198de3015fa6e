"""`logweir train`: ask for a training, watch it, list those that wait or ran, cancel one."""

import argparse
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime

from pipeline.commands.common import err, out, print_json, printable, reached, redis_explained, settings_of
from pipeline.controller.trainings import Status, TrainingRequest, Trainings, TrainingState, query_of
from pipeline.controller.watchlist import check_pattern, covers, model_of, unmatched
from pipeline.errors import BadInput, Cancelled, TrainingFailed
from pipeline.ledger.ledger import Ledger
from pipeline.producer import Producer
from pipeline.records.batch import utc_now
from pipeline.records.query import Query, begin_of
from pipeline.redis.connection import connect
from pipeline.redis.keys import SHARED
from pipeline.settings import Settings
from pipeline.units import span


def main(args: argparse.Namespace) -> int:
    settings = reached(settings_of(args))
    with redis_explained():
        if args.list:
            return _list(args, settings)
        if args.cancel is not None:
            return _cancel(args, settings)
        return _train(args, settings)


def _train(args: argparse.Namespace, settings: Settings) -> int:
    client = connect(settings)
    request = _request(args, settings, sorted(Ledger(client, settings).backlog.totals()))
    trainings = Trainings(client, settings)
    request_id, new = trainings.request(request)
    Producer.connect(settings).submit.train(request_id)
    if not new and not args.json:
        err().print("the same training waits already; this is it", markup=False)
    if args.no_wait:
        return _say_queued(args, trainings.status(request_id))
    status = _watched(trainings, request_id)
    if args.json and status.state is TrainingState.COMPLETED:
        print_json(asdict(status))
        return 0 if status.published else 1
    if status.state is TrainingState.CANCELLED:
        raise Cancelled(f"the training was cancelled: {status.reason}")
    if status.state is not TrainingState.COMPLETED:
        raise TrainingFailed(status.reason)
    learnt = f"learnt from {status.lines:,} lines ({status.patterns:,} distinct) in {status.elapsed_s:.1f} s"
    if status.published:
        out().print(f"{status.version} is live: {learnt}", markup=False)
        return 0
    out().print(
        f"{status.version} was {learnt} and is kept as a candidate, because {printable(status.reason)}; "
        f"`logweir models promote {status.version}` makes it live all the same",
        markup=False,
        soft_wrap=True,
    )
    return 1


def _request(args: argparse.Namespace, settings: Settings, seen_workloads: list[str]) -> TrainingRequest:
    patterns = tuple(check_pattern(p) for p in args.workload or ())
    nothing = unmatched(patterns, seen_workloads)
    if nothing:
        raise BadInput(f"no workload matches {nothing[0]!r}; `logweir status` shows those that have logs")
    query = _with_span(query_of(settings, utc_now()), args)
    if args.exclude:
        query = replace(query, exclude_words=(*query.exclude_words, *args.exclude))
    return TrainingRequest(
        model=_model_of(patterns, seen_workloads, settings),
        patterns=patterns,
        query=query,
        why="logweir train",
    )


def _model_of(patterns: tuple[str, ...], seen_workloads: list[str], settings: Settings) -> str:
    """Whose model is to be trained. Raises BadInput when the names mean more than one."""
    if not patterns:
        return SHARED
    named = [w for w in seen_workloads if covers(patterns, w)]
    own_models = [w for w in named if model_of(w, settings.train.own_models) != SHARED]
    if not own_models:
        return SHARED
    if len(named) == 1:
        return own_models[0]
    raise BadInput(
        f"{own_models[0]!r} has a model of its own and is trained alone; name it alone, or only workloads "
        "that share theirs"
    )


def _with_span(query: Query, args: argparse.Namespace) -> Query:
    now = utc_now()
    if args.since:
        query = replace(query, since=_moment("--since", args.since, now))
    if args.until:
        query = replace(query, until=_moment("--until", args.until, now))
    if query.since is not None and query.since > now:
        raise BadInput(f"--since {args.since!r} lies in the future; no line can be in it")
    if query.since is not None and query.until is not None and query.since >= query.until:
        raise BadInput(f"--since {args.since!r} is not before --until {args.until!r}; exchange them")
    return query


def _moment(flag: str, text: str, now: datetime) -> datetime:
    """A span back from now, or a moment in ISO 8601. Raises BadInput."""
    try:
        length = span(text)
        if length is not None:
            return begin_of(now, length.total_seconds())
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        raise BadInput(
            f"{flag} {text!r} is neither a span such as 15m, 1h, 7d nor a time such as 2026-11-20T10:00:00Z"
        ) from exc


def _watched(trainings: Trainings, request_id: str) -> Status:
    """Wait for the end, showing where it stands."""
    with err().status("queued") as line:
        while not (status := trainings.followed(request_id)).ended:
            if status.state is TrainingState.NONE:
                raise TrainingFailed("Redis has forgotten this training; ask for it again")
            line.update(_progress(status))
            time.sleep(0.2)
    return status


def _progress(status: Status) -> str:
    if status.state is TrainingState.QUEUED:
        wait_s = max(0.0, status.not_before_ms / 1000 - time.time())
        later = f", begins in {wait_s:.0f} s" if wait_s > 1 else ""
        return f"queued{', try ' + str(status.attempt) if status.attempt > 1 else ''}{later}"
    if status.state is TrainingState.FETCHING:
        return f"reading, {status.lines:,} lines so far"
    remaining = f", {status.remaining_s:.0f} s left" if status.remaining_s else ""
    return f"{status.state.value} {status.percent:.0f} %{remaining}"


def _say_queued(args: argparse.Namespace, status: Status) -> int:
    if args.json:
        print_json(asdict(status))
    else:
        out().print(
            f"training {status.request_id} is {status.state.value}; `logweir train --list` shows it",
            markup=False,
            soft_wrap=True,
        )
    return 0


def _list(args: argparse.Namespace, settings: Settings) -> int:
    found = Trainings(connect(settings), settings).recent()
    if args.json:
        print_json([asdict(status) for status in found])
        return 0
    console = out()
    if not found:
        console.print("no trainings yet; `logweir train` asks for one")
        return 0
    for status in found:
        created = datetime.fromtimestamp(status.created_ms / 1000, UTC)
        whose = "" if status.model == SHARED else f", own model of {printable(status.model)}"
        console.print(status.request_id, style="bold", markup=False, soft_wrap=True)
        console.print(
            f"  {_state(status)}; asked by {status.asked_by} on {created:%Y-%m-%d %H:%M:%S} UTC{whose}",
            markup=False, soft_wrap=True,
        )  # fmt: skip
        why = status.reason or status.why
        if why:
            console.print(f"  {printable(why)}", markup=False, soft_wrap=True)
    return 0


def _state(status: Status) -> str:
    if status.state is TrainingState.COMPLETED:
        fate = "" if status.published else ", kept as a candidate"
        return f"completed, {status.version}{fate}"
    if status.ended:
        return status.state.value
    return _progress(status)


def _cancel(args: argparse.Namespace, settings: Settings) -> int:
    trainings = Trainings(connect(settings), settings)
    now = trainings.now()
    request_id = args.cancel or ("" if now.ended else now.request_id)
    if not request_id:
        raise BadInput("no training waits or runs, so there is nothing to cancel")
    answer = trainings.cancel(request_id)
    if args.json:
        print_json({"request_id": request_id, "answer": answer})
    else:
        word = "is cancelled" if answer == "cancelled" else "stops at its next step"
        out().print(f"training {request_id} {word}", markup=False, soft_wrap=True)
    return 0
