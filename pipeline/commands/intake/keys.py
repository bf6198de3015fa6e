"""`logweir keys add | list | revoke`: who may send to the intake, and who may ask the API."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from pipeline.commands.common import (
    cell,
    out,
    print_json,
    printable,
    reached,
    reading,
    redis_explained,
    settings_of,
)
from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.redis.connection import connect
from pipeline.service.access.audit import user_of_machine
from pipeline.service.access.key_changes import KeyAsked, add_key, revoke_key
from pipeline.service.access.keys import GPU, INFER, SEND, SenderKeys
from pipeline.service.values import KeyView
from pipeline.settings import Settings


def main(args: argparse.Namespace) -> int:
    if args.action == "list":
        with redis_explained():
            return _list(args, reading(args).keys())
    if args.url is not None:
        raise BadInput(f"`logweir keys {args.action}` works on the machine itself; leave out --url")
    settings = reached(settings_of(args))
    keys = SenderKeys(connect(settings), settings)
    with redis_explained():
        if not args.name:
            raise BadInput(f"`logweir keys {args.action}` needs a name, such as that of the sender")
        return (_add if args.action == "add" else _revoke)(args, keys, settings)


def _add(args: argparse.Namespace, keys: SenderKeys, settings: Settings) -> int:
    first = not any(key.may(SEND) for key in keys.look())
    asked = KeyAsked(
        name=args.name,
        scopes=tuple(args.scope) or (SEND,),
        workload=args.workload or "",
        only=args.only,
        lasts=getattr(args, "for"),
        tenant=args.tenant,
    )
    new = add_key(keys.client, settings, asked, by=user_of_machine(), flag="--for")
    if args.json:
        print_json({"name": args.name, "key": new.key})
        return 0
    console = out()
    console.print(new.key, markup=False, soft_wrap=True)
    console.print("this is the only time it is shown; send it as `Authorization: Bearer KEY`", markup=False)
    if first and SEND in new.scopes:
        console.print(
            "from now on every request to the intake needs a key, also on this machine", markup=False
        )
    return 0


def _revoke(args: argparse.Namespace, keys: SenderKeys, settings: Settings) -> int:
    revoke_key(keys.client, settings, args.name, by=user_of_machine(), remedy="`logweir keys list` shows")
    count = sum(key.may(SEND) for key in keys.look())
    if args.json:
        print_json({"name": args.name, "keys": count})
        return 0
    console = out()
    console.print(f"{printable(args.name)} is refused from now on", markup=False)
    if not count:
        console.print(
            "it was the last one that sends: programs on this machine send without a key again", markup=False
        )
    return 0


def _list(args: argparse.Namespace, found: Sequence[KeyView]) -> int:
    if args.json:
        print_json([asdict(key) for key in found])
        return 0
    console = out()
    if not found:
        console.print(
            "there is no key: programs on this machine send without one, others not at all", markup=False
        )
        return 0
    table = Table("key", "scopes", "workloads", "made (UTC)", "expires", box=None, pad_edge=False)
    for key in found:
        sends_for = (key.workload and f"all as {key.workload}") or ", ".join(key.only) or "all workloads"
        expires = "" if key.expires is None else f"{key.expires:%Y-%m-%d %H:%M}"
        if key.expires is not None and key.expires <= utc_now():
            expires = f"expired {expires}"
        scopes = [f"{scope} as {key.tenant}" if scope in (INFER, GPU) else scope for scope in key.scopes]
        row = (key.name, ", ".join(scopes), sends_for, f"{key.created:%Y-%m-%d %H:%M}", expires)
        table.add_row(*map(cell, row))
    console.print(table)
    return 0
