"""`logweir gpu request`: a lease for a program that is started some other way; also reads a need from
flags."""

import argparse
import os
import pwd
import re
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped] # it publishes no types

from pipeline.commands.common import out, print_json
from pipeline.errors import BadInput, BadSetting, LeaseRefused, LogweirError
from pipeline.gpu.node import enforce, mps
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.policy.explain import short, wanted
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Device, DeviceKind, LeaseMode, Need, PoolLease, Snapshot
from pipeline.settings import Settings, inherited
from pipeline.units import mib, seconds, size, span

LATER: Final = 75  # EX_TEMPFAIL of sysexits.h: trying again later may succeed
MODEL: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._|-]{0,118}[A-Za-z0-9])?")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
FOR: Final = "1h"
MOST_S: Final = 7 * 86_400.0  # a lease that is not renewed must end some day.
# Variables of a program's environment about its allocator and MPS.
INHERITED: Final = (
    "PATH", "CUDA_MPS_PIPE_DIRECTORY", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", *enforce.FRACTIONS,
)  # fmt: skip


def main(args: argparse.Namespace, pool: Pool, settings: Settings) -> int:
    """Ask, begin, and print the variables for the program."""
    need, wait_s = need_of(args, pool), seconds_of("--wait", args.wait, 0.0)
    lasts_s = seconds_of("--for", args.duration or FOR, 0.0)
    if not 0 < lasts_s <= MOST_S:
        raise BadInput(f"--for {args.duration!r} must be above 0 and at most 7d: nobody renews such a lease")
    need, name = replace(need, max_duration_s=lasts_s), request_name(args, "lease")
    if args.name:
        _refuse_another(pool.snapshot(), name, need)
    with name_explained(pool, name, user(), BadInput):
        lease = pool.request(
            need, holder=user(), request_id=name, ttl_ms=int(lasts_s * 1000), timeout_s=wait_s
        )
    if args.name:  # another process may have asked under it meanwhile
        _refuse_another(pool.snapshot(), name, need)
    host = this_node() if args.pid is not None else _node(pool, lease)
    try:
        variables = program_environment(pool, lease, settings, node=host, allocator=not args.no_torch_limit)
    except BadInput:
        pool.release(lease)
        raise
    # Active at once: from here on the program may use the device at any time.
    if not pool.ledger.activate(lease, pids=() if args.pid is None else (args.pid,), host=host):
        raise LeaseRefused(f"lease {lease.lease_id} was taken away at once; ask again")
    if args.json:
        print_json(
            {
                "lease": lease.lease_id,
                "token": lease.token,
                "expires_ms": lease.deadline_ms,
                "devices": [part.uuid for part in lease.parts],
                "node": host,
                "environment": variables,
            }
        )
        return 0
    console, uuids = out(), variables["CUDA_VISIBLE_DEVICES"].split(",")
    if args.shell:
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    else:
        lines = [
            f"lease    {lease.lease_id}",
            f"token    {lease.token}",
            f"device   {lease_words(lease)}",
            f"expires  in {seconds(lease.ttl_ms / 1000)}; nobody renews it",
            f"docker   --gpus {shlex.quote(enforce.docker_devices(uuids))}",
            f"podman   {shlex.join(enforce.podman_devices(uuids))}",
            f"release  logweir gpu release {lease.lease_id} --token {lease.token}",
            "",
            *(f"{name}={value}" for name, value in variables.items()),
        ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return 0


@contextmanager
def name_explained(pool: Pool, name: str, holder: str, error: type[LogweirError]) -> Iterator[None]:
    """Turns the refusal of a name in use into this error; any other refusal explains itself."""
    try:
        yield
    except LeaseRefused as exc:
        snapshot = pool.snapshot()
        owners = {x.lease_id: x.holder for x in snapshot.leases}
        owners |= {x.request_id: x.holder for x in snapshot.waiting}
        if owners.get(name, holder) != holder:
            raise error(f"{name!r} belongs to {owners[name]}; take another --name") from exc
        raise


def _refuse_another(snapshot: Snapshot, name: str, need: Need) -> None:
    """A lease of this name must agree with the need, except in its duration. Raises BadInput."""
    lease = next((x for x in snapshot.leases if x.lease_id == name and x.holder == user()), None)
    if lease is None:
        return
    had = _other_than(lease, need, snapshot)
    if had:
        raise BadInput(f"the lease {name!r} has {had}; release it first or ask under another --name")


def _other_than(lease: PoolLease, need: Need, snapshot: Snapshot) -> str:
    """The difference between a lease and the need, "" when the lease will do."""
    has = lease.need
    amount = (
        "mode", "memory_mib", "compute_percent", "devices", "device_kind", "model", "cpu_milli",
        "node_memory_mib", "same_node",
    )  # fmt: skip
    if any(getattr(has, name) != getattr(need, name) for name in amount):
        offered, wished = wanted(has), wanted(need)
        if offered != wished:
            return f"{offered}, not {wished}"
        if has.memory_mib != need.memory_mib:
            return f"{has.memory_mib} MiB, not {need.memory_mib} MiB"
        if has.cpu_milli != need.cpu_milli:
            return f"{has.cpu_milli / 1000:g} cores, not {need.cpu_milli / 1000:g}"
        if has.node_memory_mib != need.node_memory_mib:
            return f"{has.node_memory_mib} MiB of its node, not {need.node_memory_mib} MiB"
        return f"--device-kind {has.device_kind}, not {need.device_kind}"

    if has.tenant != need.tenant:
        return f"tenant {has.tenant}, not {need.tenant}"
    if has.priority != need.priority:
        return f"priority {has.priority}, not {need.priority}"
    if has.preemptible != need.preemptible:
        return "no --preemptible" if need.preemptible else "--preemptible"
    uuids = {part.uuid for part in lease.parts}
    if need.device and uuids != {need.device}:
        return f"{', '.join(sorted(uuids))}, not {need.device}"
    nodes = {device.node for device in snapshot.devices if device.uuid in uuids}
    if need.node and nodes - {need.node}:
        return f"devices of {', '.join(sorted(nodes))}, not of {need.node}"
    return ""


def need_of(args: argparse.Namespace, pool: Pool, *, node: str = "") -> Need:
    """The need that the flags describe. `node`: only there. Raises BadInput, RedisUnavailable."""
    if args.exclusive and args.compute:
        raise BadInput("an exclusive lease has all of a device; leave out --compute, or --exclusive")
    if not args.exclusive and args.memory is None:
        raise BadInput(
            "say how much memory the program needs, as in --memory 4GiB, or --exclusive for a whole device"
        )
    here = this_node()
    pid = getattr(args, "pid", None)
    if pid is not None:
        node = here
        if pid < 1 or not psutil.pid_exists(pid):
            raise BadInput(f"there is no process {pid} on {here}; name one that runs, or leave --pid out")
    if node and args.node not in ("", node):
        raise BadInput(
            f"--node {args.node!r} is another machine than this one, {node!r}; run the command there"
        )
    length_s = None if args.duration is None else seconds_of("--for", args.duration, 0.0)
    if length_s is not None and length_s <= 0:
        raise BadInput(f"--for {args.duration!r} must be above 0; write 90s, 15m or 2h")
    return Need(
        tenant=args.tenant,
        mode=LeaseMode.EXCLUSIVE if args.exclusive else LeaseMode.SHARED,
        memory_mib=0 if args.memory is None else _memory("--memory", args.memory),
        compute_percent=args.compute,
        devices=args.devices,
        priority=args.priority,
        max_duration_s=length_s,
        preemptible=args.preemptible,
        node=node or args.node,
        device_kind=DeviceKind(args.device_kind),
        model=_model(args.model),
        cpu_milli=args.cpu,
        node_memory_mib=0 if args.node_memory is None else _memory("--node-memory", args.node_memory),
        same_node=args.same_node,
        device=args.device if not args.device else device_of(args.device, pool.snapshot()).uuid,
    )


def device_of(text: str, snapshot: Snapshot) -> Device:
    """The device with this UUID, or with this beginning of it. Raises BadInput."""
    found = [device for device in snapshot.devices if text and device.uuid.startswith(text)]
    exact = [device for device in found if device.uuid == text]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        raise BadInput(f"{len(found)} devices begin with {text!r}; write more of the UUID")
    raise BadInput(f"there is no device {text!r} in the pool; `logweir gpu top` shows those there are")


def _memory(flag: str, text: str) -> int:
    try:
        return mib(text)
    except BadSetting as exc:
        raise BadInput(f"{flag} {exc}") from exc


def _model(text: str) -> str:
    if text and not MODEL.fullmatch(text):
        raise BadInput(
            f"--model {text!r} is no model; write words of a GPU's name, as in A100 or 'A100|H100' "
            "(letters, digits, blanks and . _ - |, at most 120)"
        )
    return text


def seconds_of(flag: str, text: str | None, default: float) -> float:
    """A span in seconds. Raises BadInput."""
    if text is None:
        return default
    if text.strip() == "0":
        return 0.0
    try:
        found = span(text)
    except OverflowError:
        found = None
    if found is None:
        raise BadInput(f"{flag} {text!r} is not a span; write 90s, 15m, 2h or 7d")
    return found.total_seconds()


def request_name(args: argparse.Namespace, kind: str) -> str:
    """The id of --name, or a random one that begins with `kind`. Raises BadInput."""
    if args.name:
        if not NAME.fullmatch(args.name):
            raise BadInput(
                f"--name {args.name!r} is no id; begin with a letter or digit,"
                " go on with those and . _ - (63 at most)"
            )
        return str(args.name)
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", kind).strip("-._")[:32]
    return f"{clean or 'lease'}-{secrets.token_hex(3)}"


def user() -> str:
    """The holder: the same for every request of one user on one machine."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = f"uid{os.getuid()}"
    return f"{name}@{this_node()}"


def program_environment(
    pool: Pool, lease: PoolLease, settings: Settings, *, node: str, allocator: bool = True
) -> dict[str, str]:
    """The environment of the program (gpu/node/enforce.py).

    Raises BadInput when one process cannot use the lease.
    """
    base = inherited(*INHERITED)
    directory = base.get("CUDA_MPS_PIPE_DIRECTORY")
    daemon = None
    if node == this_node():
        daemon = mps.for_lease(
            [part.uuid for part in lease.parts],
            directory=None if directory is None else Path(directory),
            path=base.get("PATH", mps.PATHS),
        )
    devices = pool.snapshot().devices
    return enforce.lease_environment(
        lease, devices, settings, mps=daemon, base=base, node=node, allocator=allocator
    )


def lease_words(lease: PoolLease) -> str:
    """`GPU-1a2b3c4d, 4.0 GiB, 25 %`."""
    names = ", ".join(short(part.uuid) for part in lease.parts)
    if lease.need.mode is LeaseMode.EXCLUSIVE:
        return f"{names}, whole"
    part = lease.parts[0]
    percent = f", {part.compute_percent} %" if part.compute_percent else ""
    return f"{names}, {size(part.memory_mib)}{percent}{' each' if len(lease.parts) > 1 else ''}"


def _node(pool: Pool, lease: PoolLease) -> str:
    """Where the devices are, "" when they are on several machines."""
    uuids = {part.uuid for part in lease.parts}
    nodes = {device.node for device in pool.snapshot().devices if device.uuid in uuids}
    return nodes.pop() if len(nodes) == 1 else ""
