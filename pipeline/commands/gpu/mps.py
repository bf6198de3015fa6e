"""`logweir gpu mps start | stop | status DEVICE`: the MPS daemon of a GPU of this machine.

With a daemon, leases on the device have limits of memory and compute that MPS enforces. Tests use a made-up
control program; docs/gpu.md says what NVIDIA's own did.
"""

import argparse
from typing import Any

from pipeline.commands.common import out, print_json, printable
from pipeline.errors import BadInput
from pipeline.gpu.node import mps
from pipeline.gpu.node.inventory import this_node
from pipeline.settings import inherited


def main(args: argparse.Namespace, pool: Any) -> int:
    """Raises BadInput where the daemon cannot be started or stopped."""
    from pipeline.commands.gpu.request import device_of

    snapshot = pool.snapshot()
    device = device_of(args.device, snapshot)
    if device.node != this_node():
        raise BadInput(f"{device.uuid} is a GPU of {device.node}; run `logweir gpu mps` on that machine")
    path = inherited("PATH").get("PATH", mps.PATHS)
    on_it = sorted(
        lease.lease_id for lease in snapshot.leases if any(part.uuid == device.uuid for part in lease.parts)
    )
    if args.change == "start":
        if on_it and not args.yes:
            raise BadInput(
                f"lease {on_it[0]} lives on {device.uuid}, and its program would run beside the daemon, "
                "without its limits; wait for its end, or say --yes"
            )
        daemon = mps.start_daemon(device.uuid, path=path)
        facts: dict[str, Any] = {"device": device.uuid, "running": True, "directory": str(daemon.directory)}
        return _said(args, facts, f"an MPS daemon serves {device.uuid}; new leases there get its limits")
    found = mps.find(device.uuid, path=path)
    clients = None if found is None else mps.clients(found)
    if args.change == "stop":
        return _stop(args, device.uuid, found, clients)
    facts = {
        "device": device.uuid,
        "running": found is not None,
        "directory": None if found is None else str(found.directory),
        "own": found is not None and found.uuid == device.uuid,
        "clients": None if clients is None else sorted(clients),
    }
    if found is None:
        words = f"no MPS daemon serves {device.uuid}; the driver time-slices its programs"
    else:
        whose = "its own" if found.uuid else "a shared"
        listed = ", ".join(map(str, sorted(clients or ()))) or "none"
        words = f"{device.uuid} has {whose} MPS daemon in {found.directory}; processes under it: {listed}"
    return _said(args, facts, words)


def _stop(args: argparse.Namespace, uuid: str, found: mps.Daemon | None, clients: set[int] | None) -> int:
    if found is None or found.uuid != uuid:
        raise BadInput(f"{uuid} has no MPS daemon of its own; `logweir gpu mps status` shows what serves it")
    if clients and not args.yes:
        raise BadInput(
            f"process {', '.join(map(str, sorted(clients)[:5]))} runs under the MPS daemon of {uuid} and would end "
            "with it; end the program first, or say --yes"
        )
    if not mps.stop_daemon(found):
        raise BadInput(f"the MPS daemon in {found.directory} does not answer; end its process by hand")
    facts = {"device": uuid, "running": False}
    return _said(args, facts, f"the MPS daemon of {uuid} has ended; programs there are time-sliced")


def _said(args: argparse.Namespace, facts: dict[str, Any], words: str) -> int:
    if args.json:
        print_json(facts)
    else:
        out().print(printable(words), markup=False, soft_wrap=True)
    return 0
