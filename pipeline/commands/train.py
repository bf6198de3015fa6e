"""`logweir train`: ask for a training, watch it, list those that wait or ran, cancel one."""

import argparse
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from pipeline.commands.common import (
    err,
    named_workloads,
    out,
    print_json,
    printable,
    reached,
    reading,
    redis_explained,
    settings_of,
)
from pipeline.controller.training_status import Status, TrainingState
from pipeline.errors import BadInput, Cancelled, TrainingFailed
from pipeline.records.batch import LearntFrom, utc_now
from pipeline.redis.keys import SHARED
from pipeline.units import span

if TYPE_CHECKING:
    from pipeline.controller.trainings import Trainings
    from pipeline.service.trainings import TrainingAsked
    from pipeline.settings import Settings
    from pipeline.settings.train_source import TrainSource

_NAMED: Final = 10  # workloads of a source
_ORIGINS: Final = {
    LearntFrom.BASELINE: "the baseline of",
    LearntFrom.RESULTS: "stored results of",
    LearntFrom.DOCUMENTS: "documents of",
}


def main(args: argparse.Namespace) -> int:
    if args.list:
        with redis_explained():
            return _list(args)
    if args.url is not None:
        raise BadInput("`logweir train` without --list works on the machine itself; leave out --url")
    settings = reached(settings_of(args))
    with redis_explained():
        return _train(args, settings) if args.cancel is None else _cancel(args, settings)


def _train(args: argparse.Namespace, settings: "Settings") -> int:
    from pipeline.controller.trainings import Trainings
    from pipeline.redis.connection import connect
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.trainings import request_training

    client = connect(settings)
    trainings = Trainings(client, settings)
    request_id, new = request_training(client, settings, _asked(args), by=user_of_machine())
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
    _print_result(status)
    return 0 if status.published else 1


def _print_result(status: Status) -> None:
    """The version and its fate, then what each workload was learnt from."""
    learnt = f"learnt from {status.lines:,} lines ({status.patterns:,} distinct) in {status.elapsed_s:.1f} s"
    if status.published:
        fate = f"{status.version} is live: {learnt}"
    else:
        fate = (
            f"{status.version} was {learnt} and is kept as a candidate, because {printable(status.reason)}; "
            f"`logweir models promote {status.version}` makes it live all the same"
        )
    for line in (fate, *learnt_from(status), *(f"  {printable(text)}" for text in status.not_judged)):
        out().print(line, markup=False, soft_wrap=True)


def learnt_from(status: Status) -> list[str]:
    """Which workloads were learnt from what, a line for each source, the workloads with most lines first."""
    lines = []
    for origin in LearntFrom:
        counts = {
            name: status.workloads.get(name, 0) for name, o in status.learnt_from.items() if o is origin
        }
        names = sorted(counts, key=lambda name: (-counts[name], name))
        shown = [f"{printable(name) or 'no workload'} ({counts[name]:,} lines)" for name in names[:_NAMED]]
        if len(names) > _NAMED:
            shown.append(f"and {len(names) - _NAMED:,} more")
        if shown:
            lines.append(f"  from {_ORIGINS[origin]} {', '.join(shown)}")
    return lines


def _asked(args: argparse.Namespace) -> "TrainingAsked":
    """The training of the flags. Raises BadInput."""
    from pipeline.service.trainings import TrainingAsked

    now = utc_now()
    since, until = (
        None if not text else _moment(flag, text, now)
        for flag, text in (("--since", args.since), ("--until", args.until))
    )
    if since is not None and until is not None and since >= until:
        raise BadInput(f"--since {args.since!r} is not before --until {args.until!r}; exchange them")
    return TrainingAsked(
        workloads=named_workloads(args.workload, args.workloads),
        since=since,
        until=until,
        exclude=args.exclude or (),
        source=_source(args),
    )


def _source(args: argparse.Namespace) -> "TrainSource | None":
    """The documents of --opensearch. Raises BadInput."""
    from pipeline.settings.train_source import TrainSource, checked_index, level_words

    if args.opensearch is None:
        for flag, value in (("--query", args.query), ("--level-not", args.level_not)):
            if value is not None:
                raise BadInput(f"{flag} is for documents; name their index with --opensearch")
        return None
    try:
        index = checked_index(args.opensearch)
    except ValueError as exc:
        raise BadInput(f"--opensearch {exc}") from exc
    return TrainSource(
        store="opensearch", index=index, level_not=level_words(args.level_not or ""), query=args.query
    )


def _moment(flag: str, text: str, now: datetime) -> datetime:
    """A span back from now, or a moment in ISO 8601. Raises BadInput."""
    from pipeline.records.query import begin_of

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


def _watched(trainings: "Trainings", request_id: str) -> Status:
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


def _list(args: argparse.Namespace) -> int:
    found = reading(args).trainings()
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


def _cancel(args: argparse.Namespace, settings: "Settings") -> int:
    from pipeline.redis.connection import connect
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.trainings import cancel_training

    request_id, answer = cancel_training(connect(settings), settings, args.cancel or "", by=user_of_machine())
    if args.json:
        print_json({"request_id": request_id, "answer": answer})
    else:
        word = "is cancelled" if answer == "cancelled" else "stops at its next step"
        out().print(f"training {request_id} {word}", markup=False, soft_wrap=True)
    return 0
