"""`logweir gpu submit|cancel|wait`: programs that run where they get a lease.

Every verb reads and changes records in Redis alone, so it may end, or be killed, at any time.
"""

import argparse
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from pipeline.commands.common import out, print_json, printable
from pipeline.commands.gpu.job_view import POLL_S, job_remark, through_outages
from pipeline.commands.gpu.request import LATER, need_of, request_name, seconds_of, user
from pipeline.errors import BadInput
from pipeline.gpu.gang import MOST_RANKS, RANK_VARIABLES
from pipeline.gpu.job_files import RESULTS, UPLOAD, fetch_files, put_files
from pipeline.gpu.jobs import ENDED, JobState, PoolJob, PoolJobs
from pipeline.gpu.node.enforce import VARIABLES
from pipeline.gpu.node.engine import checked_image
from pipeline.gpu.pool import Pool
from pipeline.redis.connection import now_ms
from pipeline.service.gpu import job_facts
from pipeline.settings import Settings
from pipeline.store.choose import open_store

LONGEST_NAME: Final = 56  # the number of a try follows
MOST_RETRIES: Final = 100
MOST_TEXT: Final = 64 * 1024  # characters of a command and its variables: each is in a record of Redis
VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


def main(args: argparse.Namespace, pool: Pool, settings: Settings) -> int:
    jobs = PoolJobs(pool.client, settings)
    match args.action:
        case "submit":
            return _submit(args, pool, jobs, settings)
        case "cancel":
            return _cancel(args, jobs, settings)
        case _:
            return _wait(args, jobs, settings)


def _submit(args: argparse.Namespace, pool: Pool, jobs: PoolJobs, settings: Settings) -> int:
    from pipeline.service.access.audit import record_change, user_of_machine

    job = _job_of(args, pool)
    if args.upload is not None:
        directory = Path(args.upload)
        if not directory.is_dir():
            raise BadInput(f"--upload {args.upload!r} is no directory; name one")
        if jobs.find(job.job_id) is not None:
            raise BadInput(f"there is a job {job.job_id!r} already; take another --name")
        files = put_files(open_store(settings.data.store), job.job_id, UPLOAD, directory)
        job = replace(job, upload=files)
    jobs.submit(job)
    record_change(pool.client, settings, by=user_of_machine(), action="gpu.submit", target=job.job_id)
    if args.json:
        print_json(job_facts(job, now_ms(pool.client)))
    else:
        out().print(job.job_id, markup=False, soft_wrap=True)
    return 0


def _job_of(args: argparse.Namespace, pool: Pool) -> PoolJob:
    """The job that the flags describe. Raises BadInput."""
    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    image = "" if args.image is None else checked_image(args.image)
    if not command and not image:
        raise BadInput(
            "name the program after --, as in `logweir gpu submit --memory 4GiB -- python train.py`"
        )
    if not 0 <= args.retries <= MOST_RETRIES:
        raise BadInput(f"--retries {args.retries} must be from 0 to {MOST_RETRIES}")
    for one in args.env:
        if not VARIABLE.fullmatch(one) or "\0" in one:
            raise BadInput(f"--env {one!r} is no variable; write NAME=VALUE")
        if _name(one) in VARIABLES:
            raise BadInput(f"--env {one!r} is set by the lease; leave it out")
    if (length := sum(map(len, (*command, *args.env)))) > MOST_TEXT:
        raise BadInput(
            f"the command and its variables have {length:,} characters, and {MOST_TEXT:,} are the most; "
            "put long texts into files of --upload"
        )
    name = request_name(args, Path(command[0]).name if command else image.rpartition("/")[2])
    if len(name) > LONGEST_NAME:
        raise BadInput(f"--name {name!r} has {len(name)} characters; a job takes at most {LONGEST_NAME}")
    need = need_of(args, pool)
    gang = need.devices > 1 and not args.one_process
    if gang and image:
        raise BadInput(
            f"--image with --devices {need.devices} starts no gang: ranks of a gang run outside containers; "
            "add --one-process for one container with all devices, or leave --image out"
        )
    if gang and need.devices > MOST_RANKS:
        raise BadInput(f"--devices {need.devices} are too many: a gang has at most {MOST_RANKS} processes")
    if gang and (names := RANK_VARIABLES.keys() & set(map(_name, args.env))):
        raise BadInput(f"--env {min(names)} is set by the gang; leave it out, or add --one-process")
    need = replace(need, same_node=args.one_process or need.same_node)  # one process cannot span two
    if why := pool.refusal(need):
        raise BadInput(why)
    return PoolJob(
        job_id=name,
        user=user(),
        command=tuple(command),
        need=need,
        environment=tuple(args.env),
        retries=args.retries,
        grace_s=seconds_of("--grace", args.grace, 10.0),
        allocator=not args.no_torch_limit,
        gang=gang,
        image=image,
    )


def _name(variable: str) -> str:
    return variable.partition("=")[0]


def _cancel(args: argparse.Namespace, jobs: PoolJobs, settings: Settings) -> int:
    from pipeline.service.access.audit import record_change, user_of_machine

    job = jobs.known(args.job)
    changed = jobs.change(job.job_id, lambda now: replace(now, cancel=True))
    if changed is None:
        raise BadInput(f"job {job.job_id!r} has ended already: it is {jobs.known(args.job).state}")
    record_change(jobs.client, settings, by=user_of_machine(), action="gpu.cancel", target=job.job_id)
    words = (
        f"{job.job_id} is asked to end" if job.state is JobState.RUNNING else f"{job.job_id} is taken back"
    )
    if args.json:
        print_json({"cancelled": job.job_id, "was": job.state})
    else:
        out().print(printable(words), markup=False, soft_wrap=True)
    return 0


def _wait(args: argparse.Namespace, jobs: PoolJobs, settings: Settings) -> int:
    end = None if args.timeout is None else time.monotonic() + seconds_of("--timeout", args.timeout, 0.0)
    job = jobs.known(args.job)
    while job.state not in ENDED:
        if end is not None and time.monotonic() >= end:
            job_remark(f"{job.job_id} is {job.state} after {args.timeout}{f': {job.why}' if job.why else ''}")
            return LATER
        time.sleep(POLL_S)
        job = through_outages(partial(jobs.known, args.job), end=end)
    if args.results is not None and job.results is not None:
        store = open_store(settings.data.store)
        fetch_files(store, job.job_id, RESULTS, job.results, Path(args.results))
    elif args.results is not None:
        job_remark(f"{job.job_id} left no results")
    if args.json:
        print_json(job_facts(job, now_ms(jobs.client)))
    elif job.why:
        job_remark(f"{job.job_id} {job.state}: {job.why}")
    if job.state is JobState.SUCCEEDED:
        return 0
    return (job.exit_code or 1) if job.state is JobState.FAILED else LATER
