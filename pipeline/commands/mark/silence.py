"""`logweir silence WORKLOAD --for 2h --why TEXT`, `--list`, `--end ID`: not now."""

import argparse
from dataclasses import asdict

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
from pipeline.service.values import SilenceView
from pipeline.units import plural


def main(args: argparse.Namespace) -> int:
    _check(args)
    with redis_explained():
        if args.list:
            return _list(reading(args).silences(), as_json=args.json)
        if args.url is not None:
            raise BadInput("`logweir silence` without --list works on the machine itself; leave out --url")
        silence = _changed(args)
    if args.json:
        print_json(asdict(silence))
        return 0
    out().print(
        f"{'ended' if args.end is not None else 'silenced'}: {_silence_text(silence)}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises BadInput for arguments that do not belong together."""
    given = [f"--{name}" for name in ("for", "why", "template", "service") if getattr(args, name) is not None]
    if args.list or args.end is not None:
        extra = [repr(args.pattern)] * (args.pattern is not None) + given
        extra += ["--end"] * (args.list and args.end is not None)
        if extra:
            flag = "--list" if args.list else "--end"
            raise BadInput(f"`logweir silence {flag}` goes without {extra[0]}; leave it out")
    elif args.pattern is None or getattr(args, "for") is None or args.why is None:
        raise BadInput(
            "`logweir silence` needs a WORKLOAD, --for SPAN and --why TEXT; --list shows the silences, --end ID "
            "ends one"
        )


def _changed(args: argparse.Namespace) -> SilenceView:
    from pipeline.redis.connection import connect
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.silences import end_silence, put_silence

    settings = reached(settings_of(args))
    client, by = connect(settings), user_of_machine()
    if args.end is not None:
        return end_silence(client, settings, args.end, by=by)
    return put_silence(
        client, settings, args.pattern, lasts=getattr(args, "for"), why=args.why, by=by,
        template=args.template, service=args.service or "",
    )  # fmt: skip


def _list(found: list[SilenceView], *, as_json: bool) -> int:
    if as_json:
        print_json([asdict(one) for one in found])
        return 0
    for one in found:
        many = "" if one.expired else f"; {plural(one.incidents, 'incident')} now"
        out().print(f"{_silence_text(one)}{many}", markup=False, soft_wrap=True)
    if not found:
        out().print("nothing is silenced; `logweir silence WORKLOAD --for 2h --why TEXT` does", markup=False)
    return 0


def _silence_text(one: SilenceView) -> str:
    what = one.workload + (f", service {one.service}" if one.service else "")
    what += f", {one.template}" if one.template else ""
    word = "ended" if one.expired else "until"
    return printable(
        f"{one.id}  {what}, {word} {one.until:%Y-%m-%d %H:%M} UTC, by {one.by} on {one.at:%Y-%m-%d %H:%M}: {one.why}"
    )
