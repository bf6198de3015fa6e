"""`logweir health [NAME|ROLE]`: health of a worker, a role or all, with an exit code for container probes."""

import argparse
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from pipeline.commands.common import err, out, print_json, printable, reading
from pipeline.errors import LogweirError
from pipeline.service.running.values import PipelineHealth, WorkerHealth
from pipeline.units import plural

# Who probes waits for the answer, and kills the probe when it takes long.
PROBE_S: Final = 2.0


def main(args: argparse.Namespace) -> int:
    # NAME@ is the worker of that name on this machine, for probes in containers.
    target = args.what + socket.gethostname() if args.what.endswith("@") else args.what
    try:
        found = reading(args, timeout_s=PROBE_S).health(target, ready=args.ready)
    except LogweirError as exc:
        found = PipelineHealth(ok=False, why=str(exc), workers=[])
    if args.json:
        print_json(asdict(found))
    elif found.why:
        err().print(f"logweir: {printable(found.why)}", markup=False, soft_wrap=True)
    else:
        out().print(_well(found.workers), markup=False, soft_wrap=True)
    return 1 if found.why else 0


def _well(found: Sequence[WorkerHealth]) -> str:
    if len(found) != 1:
        return f"{plural(len(found), 'worker')} are well"
    one = found[0]
    last = "" if one.quiet_s is None else f", last at work {one.quiet_s:.0f} s ago"
    return f"{printable(one.name)} is well: heard of {one.silent_s:.0f} s ago{last}"
