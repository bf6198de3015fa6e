"""`logweir send --opensearch INDEX`: log documents of OpenSearch from the last cursor, once or for ever."""

import argparse
import os
import socket
import time
from dataclasses import asdict
from functools import partial

from pipeline.commands.common import awaited, err, print_json, redis_explained, settings_of
from pipeline.errors import BadInput, LeaseRefused, RedisUnavailable, SourceUnavailable
from pipeline.logs import set_up
from pipeline.producer import Producer
from pipeline.records.batch import Batch
from pipeline.records.delivery import Accepted, Full
from pipeline.redis.leases import SOURCE, HeldLease, Lease, Leases, Refused
from pipeline.settings import Settings
from pipeline.sources.opensearch import POLL_S, Polled, poll_once
from pipeline.units import plural


def main(args: argparse.Namespace) -> int:
    if args.files:
        raise BadInput("--opensearch reads an index and no file; send files apart")
    if args.baseline:
        raise BadInput(
            "--baseline is for files; train on documents of a good time with `train --since --until`"
        )
    for flag in ("workload", "wait"):
        if getattr(args, flag):
            raise BadInput(
                f"--{flag} is for files; documents name their workload (opensearch_workload_fields)"
            )
    settings = settings_of(args).replace(opensearch_source=args.opensearch)
    set_up(settings.stack.log_level)
    settings = awaited(settings, err())
    producer = Producer.connect(settings)
    leases = Leases(producer.ledger.client, settings)
    with redis_explained(), leases.holding(_lease(leases, settings)) as lease:
        if args.follow:
            return _for_ever(producer, settings, lease, args.backfill)
        return _once(args, producer, settings, lease)


def _lease(leases: Leases, settings: Settings) -> Lease:
    """One poller at a time. Raises BadInput when another one reads."""
    holder = f"send@{socket.gethostname()}:{os.getpid()}"
    deadline = (
        time.monotonic() + settings.internal.lease_ttl_ms / 1000 + 2.0
    )  # a poller that died holds it for so long
    while isinstance(answer := leases.request(SOURCE, holder, quarantine=True), Refused):
        if time.monotonic() > deadline:
            raise BadInput(
                "another process polls OpenSearch for this pipeline; `logweir status` shows a worker source, "
                "stop it first"
            )
        time.sleep(0.2)
    return answer


def _once(args: argparse.Namespace, producer: Producer, settings: Settings, lease: HeldLease) -> int:
    with err().status(f"reading {args.opensearch}"):
        polled = _poll(producer, settings, lease, args.backfill)
    if args.json:
        print_json(asdict(polled))
        return 0
    sentence = f"{plural(polled.documents, 'document')} accepted" if polled.documents else "nothing new"
    for count, subject in (
        (polled.without_message, "without a message"),
        (polled.without_time, "without a time"),
    ):
        sentence += f", {count:,} {subject}" if count else ""
    err().print(sentence, markup=False)
    return 0


def _poll(producer: Producer, settings: Settings, lease: HeldLease, backfill: bool | None) -> Polled:
    """Everything new. Raises LeaseRefused when another poller has taken over."""
    polled = poll_once(
        settings,
        partial(_accept, producer, backfill),
        producer.ledger.intake.cursor,
        go_on=lambda: not lease.lost.is_set(),
    )
    if lease.lost.is_set():
        raise LeaseRefused("another process polls this OpenSearch now; what it has not read yet it will read")
    return polled


def _accept(producer: Producer, backfill: bool | None, batch: Batch, **cursor: str | None) -> Accepted | Full:
    """As the producer does; a wait is said when it begins."""
    answer = producer.accept(batch, backfill=backfill, **cursor)  # type: ignore[arg-type]
    if isinstance(answer, Full) and answer.refused == 1:
        err().print(f"waiting: {answer}", markup=False, soft_wrap=True)
    return answer


def _for_ever(producer: Producer, settings: Settings, lease: HeldLease, backfill: bool | None) -> int:
    console = err()
    console.print(f"polling {settings.opensearch.source}; Ctrl-C stops", markup=False, soft_wrap=True)
    trouble = ""
    while True:
        try:
            polled = _poll(producer, settings, lease, backfill)
        except (SourceUnavailable, RedisUnavailable) as exc:
            if str(exc) != trouble:
                console.print(f"waiting: {exc}", markup=False, soft_wrap=True)
            trouble = str(exc)
        else:
            trouble = ""
            if polled.documents:
                console.print(f"{plural(polled.documents, 'document')} accepted", markup=False)
        time.sleep(POLL_S)
