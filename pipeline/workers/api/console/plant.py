"""Pipeline: senders, stages and queues, workers, dead letters, disk and retention."""

import time
from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from pipeline.records.batch import utc_now
from pipeline.service.access.keys import OPERATE
from pipeline.service.dead_letters import SHOWN, read_dead_batch, read_dead_letters
from pipeline.service.running.backfills import read_backfills
from pipeline.service.running.progress import BackfillProgress, SendProgress
from pipeline.service.senders import has_fallen_silent, read_senders
from pipeline.service.status import read_disk, read_queues
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.asks import the_status
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render
from pipeline.workers.kafka.progress import stored_partitions

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
Whole = Annotated[Visitor, Depends(sees(whole=True))]
Operator = Annotated[Visitor, Depends(sees(OPERATE, whole=True))]
LETTERS: Final = 20
SENDERS: Final = 60
PARTITIONS: Final = 60
BACKFILLS: Final = 12
PROGRESS_S: Final = 2.0  # the estimates of all open pages come from one look
STAGES: Final = (
    ("ingest", "cut into records"),
    ("drain", "masked, and given a template"),
    ("infer", "judged by the model"),
    ("store", "written to the sinks"),
)
DONE: Final = {"discard": "Discarded. Nothing of these batches is kept.", "retry": "Sent again."}


@router.get("/pipeline")
async def pipeline_page(
    request: Request,
    visitor: Whole,
    dead: Annotated[str | None, Query(max_length=2_000)] = None,
    done: Literal["", "discard", "retry"] = "",
) -> Response:
    """What comes in, where it waits, who works, and what could not be processed."""
    api = api_of(request)
    letters = await api.facts(read_dead_letters, api.client, api.settings, limit=LETTERS, cursor=dead)
    disk = await api.facts(read_disk, api.settings)
    return render(
        request, visitor, "pipeline.html",
        **await _moving(request), letters=letters, disk=disk, said=DONE.get(done, ""), sinks=api.settings.data.sinks,
    )  # fmt: skip


@router.get("/pipeline/moving")
async def moving_piece(request: Request, visitor: Whole) -> Response:
    """What changes from second to second, for pages that stay open."""
    return render(request, visitor, "moving.html", **await _moving(request))


@router.get("/pipeline/dead/{batch:path}")
async def dead_page(request: Request, visitor: Whole, batch: str) -> Response:
    """A dead batch with its first records, and the question before it is discarded."""
    api = api_of(request)
    found = await api.facts(read_dead_batch, api.client, api.settings, batch[:300])
    return render(request, visitor, "dead.html", batch=found, shown=SHOWN)


@router.get("/pipeline/discard")
async def discard_page(request: Request, visitor: Operator) -> Response:
    """The question before all dead letters are discarded."""
    api = api_of(request)
    letters = await api.facts(read_dead_letters, api.client, api.settings, limit=None)
    return render(
        request, visitor, "discard.html",
        total=letters.total, lines=sum(one.lines for one in letters.batches),
        workloads=sorted({one.workload for one in letters.batches}),
    )  # fmt: skip


async def _moving(request: Request) -> dict[str, Any]:
    api, now = api_of(request), utc_now()
    status = await the_status(request)
    senders = await api.shared.ask("senders", partial(api.facts, read_senders, api.client, api.settings))
    queues = await api.shared.ask("queues", partial(api.facts, read_queues, api.client, api.settings))
    kafka = await api.shared.ask("kafka", partial(api.facts, stored_partitions, api.client, api.settings))
    backfills, sends = await api.shared.ask("progress", partial(_progress, request), fresh_s=PROGRESS_S)
    return {
        "status": status,
        "backfills": backfills,
        "sends": sends,
        "senders": senders[:SENDERS],
        "more_senders": max(0, len(senders) - SENDERS),
        "silent": {(one.protocol, one.key, one.peer) for one in senders if has_fallen_silent(one, now)},
        "queues": queues,
        "kafka": kafka[:PARTITIONS],
        "more_kafka": max(0, len(kafka) - PARTITIONS),
        "stages": STAGES,
        "now_ms": now.timestamp() * 1000,
    }


async def _progress(request: Request) -> tuple[list[BackfillProgress], list[SendProgress]]:
    api = api_of(request)
    views = await api.facts(read_backfills, api.client, api.settings, BACKFILLS)
    status = await the_status(request)
    now = time.monotonic()
    return api.watch.backfills(views, now), api.watch.sends(status.workloads, now)
