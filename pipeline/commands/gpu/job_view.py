"""`logweir gpu jobs|logs`: what jobs do, on the machine itself or through an API."""

import argparse
import re
import sys
import time
from base64 import b64decode
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from rich.table import Table

from pipeline.commands.common import cell, err, out, print_json, printable
from pipeline.errors import RedisUnavailable
from pipeline.units import seconds

if TYPE_CHECKING:
    from pipeline.service.reading import PipelineReader

T = TypeVar("T")
POLL_S: Final = 0.5
# A terminal acts on other control characters of a program's output.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show_jobs(args: argparse.Namespace, at: "PipelineReader") -> int:
    """Those that ended lately and those that live."""
    found = at.gpu_jobs()
    if args.json:
        print_json(found)
        return 0
    if not found:
        out().print("no jobs; `logweir gpu submit` makes one", markup=False)
        return 0
    table = Table("job", "state", "node", "age", "user", "needs", "because", box=None, pad_edge=False)
    for job in found:
        words = (
            job["job"], job["state"], job["node"], seconds(job["age_s"]), job["user"], job["needs"], job["why"]
        )  # fmt: skip
        table.add_row(*map(cell, words))
    out().print(table)
    return 0


def show_output(args: argparse.Namespace, at: "PipelineReader") -> int:
    """The kept output of a job, and with `--follow` what comes, until it ends."""
    since, found = 0, at.gpu_job_output(args.job, 0, args.rank)
    while True:
        if found["first"] > since:
            job_remark(f"the first {found['first'] - since:,} bytes of the output are no longer kept")
        _show(b64decode(found["output"]))
        since = found["next"]
        if found["ended"] or not args.follow:
            break
        time.sleep(POLL_S)
        found = through_outages(partial(at.gpu_job_output, args.job, since, args.rank))
    if args.follow and found["why"]:
        job_remark(f"{args.job} {found['state']}: {found['why']}")
    return 0


def through_outages(ask: Callable[[], T], *, end: float | None = None) -> T:
    """The answer once Redis gives one. Raises RedisUnavailable when it is away at `end` (monotonic)."""
    said = False
    while True:
        try:
            return ask()
        except RedisUnavailable as exc:
            if end is not None and time.monotonic() >= end:
                raise
            if not said:
                job_remark(f"{exc}; the job goes on meanwhile, as long as its lease does")
            said = True
            time.sleep(POLL_S)


def job_remark(words: str) -> None:
    """A sentence about a job, beside its output."""
    err().print(f"logweir: {printable(words)}", markup=False, soft_wrap=True)


def _show(output: bytes) -> None:
    """The bytes as they are for a program, without control characters for a terminal."""
    if sys.stdout.isatty():
        sys.stdout.write(_CONTROL.sub("", output.decode("utf-8", "replace")))
        sys.stdout.flush()
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()
