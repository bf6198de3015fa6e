"""`logweir store show | adopt`: what the machines of a pipeline share, and how much lies there."""

import argparse
from collections.abc import Mapping

from pipeline.commands.common import out, print_json, printable, reached, redis_explained, settings_of
from pipeline.errors import BadBundle
from pipeline.models.registry import Registry
from pipeline.models.versions import Versions
from pipeline.redis.connection import connect
from pipeline.service.status import stored_totals
from pipeline.settings import Settings
from pipeline.sinks.usage_manifest import KEY, usage_manifest
from pipeline.store.choose import open_store
from pipeline.store.identity import identity
from pipeline.units import plural, size
from pipeline.workers.same_store import adopt, entered


def main(args: argparse.Namespace) -> int:
    settings = reached(settings_of(args), writes=args.action == "adopt")
    with redis_explained():
        client = connect(settings)
        if args.action == "adopt":
            adopt(client, settings)
        stored = Registry(client, settings).stored
        local, recorded = identity(stored.objects, make=False), entered(client, settings)
    sizes = stored.artifacts.sizes()
    versions = stored.names()
    of = stored_totals(settings)
    unreadable = [version for version in versions if not _is_whole(stored, version, sizes)]
    facts = {
        "url": stored.objects.url,
        "id": local.id if local else None,
        "pipeline": recorded or None,
        "same": local is not None and recorded.get("id") == local.id,
        "versions": len(versions),
        "incomplete": unreadable,
        "artifacts": len(sizes),
        "bytes": sum(sizes.values()),
        "results": of,
        "usage": _usage(settings),
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
    if of is not None:
        console.print(
            f"results   {plural(of['rows'], 'record')} in {plural(of['files'], 'file')}, "
            f"{size(of['bytes'] // 2**20)}",
            markup=False,
        )
    if used := facts["usage"]:
        console.print(f"usage     {used} records of GPU use", markup=False)
    for version in unreadable:
        console.print(f"fault     {version} lacks artifacts; train again, or restore them", markup=False)
    console.print(f"pipeline  {_comparison(bool(facts['same']), recorded)}", markup=False, soft_wrap=True)
    return 0 if facts["same"] else 1


def _usage(settings: Settings) -> int:
    """How many records the table `usage` has."""
    objects = open_store(settings.data.results_url)
    return sum(part.rows for part in usage_manifest(objects.get(KEY), objects.url).parts)


def _is_whole(stored: Versions, version: str, sizes: dict[str, int]) -> bool:
    try:
        stored.complete(version, sizes)
    except BadBundle:
        return False
    return True


def _comparison(same: bool, recorded: Mapping[str, object]) -> str:
    if same:
        return f"works with this store, which {printable(recorded.get('machine'))} named first"
    if not recorded:
        return "no process has begun yet"
    return (
        f"works with another store, {printable(recorded.get('url'))} of "
        f"{printable(recorded.get('machine'))}; after its loss `logweir store adopt` takes this one"
    )
