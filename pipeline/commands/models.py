"""`logweir models list | show | promote | rollback | export`: model versions and their states; changes the
live one."""

import argparse
from dataclasses import asdict
from typing import Any

from pipeline.commands.common import out, print_json, printable, reached, redis_explained, settings_of
from pipeline.drain.learner import read_templates
from pipeline.errors import BadBundle, BadInput
from pipeline.models.registry import Live, Registry
from pipeline.records.batch import utc_now
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.units import plural
from pipeline.workers.same_store import join


def main(args: argparse.Namespace) -> int:
    settings = reached(settings_of(args))
    with redis_explained():
        join(connect(settings), settings, first=False)
    actions = {"list": _list, "show": _show, "promote": _promote, "rollback": _rollback, "export": _export}
    if args.out is not None and args.action != "export":
        raise BadInput(f"`logweir models {args.action}` takes no --out; that is for `export`")
    if args.action not in {"show", "promote", "export"} and args.version:
        raise BadInput(f"`logweir models {args.action}` takes no version; {args.version!r} is one too many")
    with redis_explained():
        return actions[args.action](args, settings, Registry(connect(settings), settings))


def _list(args: argparse.Namespace, _settings: Settings, registry: Registry) -> int:
    live = {one.version: one for one in registry.live()}
    faults: dict[str, str] = {}
    for fault in registry.faults():
        described = f"on {fault.machine}: {fault.reason}"
        faults[fault.version] = (
            f"{faults[fault.version]}; {described}" if fault.version in faults else described
        )
    sizes = registry.stored.artifacts.sizes()
    rows = [_row(registry, version, live, faults, sizes) for version in registry.versions()]
    if args.json:
        print_json(rows)
        return 0
    console = out()
    if not rows:
        console.print("no models yet; train one with `logweir train`")
        return 0
    for row in rows:
        created = "" if row["created"] is None else f"{row['created']:%Y-%m-%d %H:%M:%S} UTC"
        lines = "" if row["lines"] is None else plural(row["lines"], "line")
        whose = "" if row["model"] in ("shared", "?") else f"own model of {printable(row['model'])}"
        summary = ", ".join(part for part in (row["state"], created, lines, whose) if part)
        # Never cut: a version is there to be copied, and a reason to be read.
        console.print(
            f"{row['version']}  {summary}",
            style="bold" if row["live"] else None,
            markup=False,
            soft_wrap=True,
        )
        if row["reason"]:
            console.print(f"  {printable(row['reason'])}", markup=False, soft_wrap=True)
    return 0


def _row(
    registry: Registry, version: str, live: dict[str, Live], faults: dict[str, str], sizes: dict[str, int]
) -> dict[str, Any]:
    note = registry.note(version)
    row: dict[str, Any] = {"version": version, "live": version in live}
    try:
        manifest = registry.stored.complete(version, sizes)
        row |= {"model": manifest.model, "created": manifest.created, "lines": manifest.stats.lines}
        state, reason = (note.state, note.reason) if note else ("candidate", "")
    except BadBundle as exc:
        row |= {"model": live[version].model if version in live else "?", "created": None, "lines": None}
        state, reason = "unreadable", str(exc)
    if version in live:
        state = "live" if version not in faults and state != "unreadable" else "live, unreadable"
        reason = faults.get(version, reason)
    return row | {"state": state, "reason": reason, "judgement": dict(note.judgement) if note else {}}


def _chosen(args: argparse.Namespace, registry: Registry) -> str:
    """The version of the arguments, without one the live one. Raises BadInput."""
    live = registry.current()
    version = args.version or (live.version if live else None)
    if version is None:
        raise BadInput("there is no model yet; train one with `logweir train`")
    if version not in registry.versions():
        raise BadInput(f"there is no model {version!r}; `logweir models list` shows what there is")
    return str(version)


def _export(args: argparse.Namespace, settings: Settings, registry: Registry) -> int:
    from pipeline.tasks.frames import write_export

    if args.out is None:
        raise BadInput("`logweir models export` needs --out DIR, a new folder")
    version = _chosen(args, registry)
    templates = read_templates(registry.client, Keys(settings.redis.key_prefix))
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


def _show(args: argparse.Namespace, _settings: Settings, registry: Registry) -> int:
    version = _chosen(args, registry)
    note = registry.note(version)
    print_json(asdict(registry.stored.manifest(version)) | {"state": asdict(note) if note else None})
    return 0


def _promote(args: argparse.Namespace, settings: Settings, registry: Registry) -> int:
    if not args.version:
        raise BadInput("`logweir models promote` needs a version; `logweir models list` shows what there is")
    now = registry.promote(args.version, at=utc_now(), reason=args.reason or "")
    return _moved(args, settings, now.previous, now)


def _rollback(args: argparse.Namespace, settings: Settings, registry: Registry) -> int:
    before, now = registry.roll_back(model=args.model, at=utc_now(), reason=args.reason or "")
    return _moved(args, settings, before, now)


def _moved(args: argparse.Namespace, settings: Settings, before: str, now: Live) -> int:
    from pipeline.messages.app import make_app
    from pipeline.tasks import reload

    reload.announce(make_app(settings))
    if args.json:
        print_json(asdict(now) | {"before": before})
        return 0
    instead = f", instead of {before}" if before else ""
    out().print(f"{now.version} is the live {printable(now.model)} model now{instead}", markup=False)
    return 0
