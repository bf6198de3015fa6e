"""`logweir models list | show | promote | rollback | export`: model versions and their states; changes the
live one."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeline.commands.common import (
    out,
    print_json,
    printable,
    reached,
    reading,
    redis_explained,
    settings_of,
)
from pipeline.errors import BadInput
from pipeline.imports import uncollected
from pipeline.service.values import Moved
from pipeline.units import plural

if TYPE_CHECKING:
    import redis

    from pipeline.service.reading import PipelineReader
    from pipeline.settings import Settings


def main(args: argparse.Namespace) -> int:
    if args.out is not None and args.action != "export":
        raise BadInput(f"`logweir models {args.action}` takes no --out; that is for `export`")
    if args.action not in {"show", "promote", "export"} and args.version:
        raise BadInput(f"`logweir models {args.action}` takes no version; {args.version!r} is one too many")
    if args.url is not None:
        if args.action not in ("list", "show"):
            raise BadInput(f"`logweir models {args.action}` works on the machine itself; leave out --url")
        return _read(args, reading(args))
    with uncollected():
        from pipeline.redis.connection import connect
        from pipeline.service.local import Local
        from pipeline.workers.same_store import join

    settings = reached(settings_of(args), writes=args.action not in ("list", "show"))
    client = connect(settings)
    with redis_explained():
        join(client, settings, first=False)
        if args.action in ("list", "show"):
            return _read(args, Local(settings))
        change = {"promote": _promote, "rollback": _rollback, "export": _export}
        return change[args.action](args, client, settings)


def _read(args: argparse.Namespace, at: "PipelineReader") -> int:
    if args.action == "show":
        print_json(at.model(args.version))
        return 0
    rows = at.models()
    if args.json:
        print_json([asdict(row) for row in rows])
        return 0
    console = out()
    if not rows:
        console.print("no models yet; train one with `logweir train`")
        return 0
    for row in rows:
        created = "" if row.created is None else f"{row.created:%Y-%m-%d %H:%M:%S} UTC"
        lines = "" if row.lines is None else plural(row.lines, "line")
        whose = "" if row.model in ("shared", "?") else f"own model of {printable(row.model)}"
        summary = ", ".join(part for part in (row.state, created, lines, whose) if part)
        # Never cut: a version is there to be copied, and a reason to be read.
        console.print(
            f"{row.version}  {summary}",
            style="bold" if row.live else None,
            markup=False,
            soft_wrap=True,
        )
        if row.reason:
            console.print(f"  {printable(row.reason)}", markup=False, soft_wrap=True)
    return 0


def _export(args: argparse.Namespace, client: "redis.Redis", settings: "Settings") -> int:
    from pipeline.drain.learner import read_templates
    from pipeline.models.registry import Registry
    from pipeline.redis.keys import Keys
    from pipeline.service.models import chosen_version
    from pipeline.tasks.frames import write_export

    registry = Registry(client, settings)
    if args.out is None:
        raise BadInput("`logweir models export` needs --out DIR, a new folder")
    version = chosen_version(registry, args.version)
    templates = read_templates(client, Keys(settings.redis.key_prefix))
    try:
        write_export(
            args.out,
            model=registry.stored.local(version),
            templates=templates,
            masks=settings.intake.masks,
            similarity=settings.drain.similarity,
        )
    except OSError as exc:
        raise BadInput(f"--out {args.out} cannot be written ({exc.strerror}); name another folder") from exc
    if args.json:
        print_json({"version": version, "out": str(args.out), "templates": len(templates)})
        return 0
    sentence = f"{version} and {plural(len(templates), 'template')} are in {printable(str(args.out))}"
    out().print(sentence, markup=False, soft_wrap=True)
    return 0


def _promote(args: argparse.Namespace, client: "redis.Redis", settings: "Settings") -> int:
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.models import promote_model

    if not args.version:
        raise BadInput("`logweir models promote` needs a version; `logweir models list` shows what there is")
    by = user_of_machine()
    return _moved(args, promote_model(client, settings, args.version, by=by, reason=args.reason or ""))


def _rollback(args: argparse.Namespace, client: "redis.Redis", settings: "Settings") -> int:
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.models import roll_back_model

    by = user_of_machine()
    moved = roll_back_model(client, settings, model=args.model, by=by, reason=args.reason or "")
    return _moved(args, moved)


def _moved(args: argparse.Namespace, now: Moved) -> int:
    if args.json:
        print_json(asdict(now))
        return 0
    instead = f", instead of {now.before}" if now.before else ""
    out().print(f"{now.version} is the live {printable(now.model)} model now{instead}", markup=False)
    return 0
