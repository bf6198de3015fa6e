"""`logweir store show | adopt`: what the machines of a pipeline share, and how much lies there."""

import argparse
from collections.abc import Mapping

from pipeline.commands.common import out, print_json, printable, reached, redis_explained, settings_of
from pipeline.errors import BadBundle
from pipeline.models.registry import Registry
from pipeline.models.versions import Versions
from pipeline.redis.connection import connect
from pipeline.store.identity import identity
from pipeline.units import plural, size
from pipeline.workers.same_store import adopt, entered


def main(args: argparse.Namespace) -> int:
    settings = reached(settings_of(args))
    with redis_explained():
        client = connect(settings)
        if args.action == "adopt":
            adopt(client, settings)
        stored = Registry(client, settings).stored
        own, theirs = identity(stored.objects, make=False), entered(client, settings)
    sizes = stored.artifacts.sizes()
    versions = stored.names()
    unreadable = [version for version in versions if not _is_whole(stored, version, sizes)]
    facts = {
        "url": stored.objects.url,
        "id": own.id if own else None,
        "pipeline": theirs or None,
        "same": own is not None and theirs.get("id") == own.id,
        "versions": len(versions),
        "incomplete": unreadable,
        "artifacts": len(sizes),
        "bytes": sum(sizes.values()),
    }
    if args.json:
        print_json(facts)
        return 0 if facts["same"] else 1
    console = out()
    console.print(f"store     {printable(stored.objects.url)}", markup=False, soft_wrap=True)
    console.print(
        f"          {plural(len(versions), 'model version')}, {plural(len(sizes), 'artifact')}, "
        f"{size(sum(sizes.values()) // 2**20)}",
        markup=False,
    )
    for version in unreadable:
        console.print(f"fault     {version} lacks artifacts; train again, or restore them", markup=False)
    console.print(f"pipeline  {_said(bool(facts['same']), theirs)}", markup=False, soft_wrap=True)
    return 0 if facts["same"] else 1


def _is_whole(stored: Versions, version: str, sizes: dict[str, int]) -> bool:
    try:
        stored.whole(version, sizes)
    except BadBundle:
        return False
    return True


def _said(same: bool, theirs: Mapping[str, object]) -> str:
    if same:
        return f"works with this store, which {printable(theirs.get('machine'))} named first"
    if not theirs:
        return "no process has begun yet"
    return (
        f"works with another store, {printable(theirs.get('url'))} of {printable(theirs.get('machine'))}; after "
        "its loss `logweir store adopt` takes this one"
    )
