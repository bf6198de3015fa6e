"""`logweir dead list | show | retry | discard`: batches that could not be processed."""

import argparse
from dataclasses import asdict
from typing import Final

from pipeline.commands.common import (
    out,
    print_json,
    printable,
    reached,
    reading,
    redis_explained,
    settings_of,
)
from pipeline.errors import BadInput, BadPayload
from pipeline.units import plural

PAGE: Final = 100  # batches listed at once


def main(args: argparse.Namespace) -> int:
    if args.action == "list":
        if args.batch:
            raise BadInput(
                f"`logweir dead list` takes no batch id; `logweir dead show {args.batch[0]}` shows one"
            )
        with redis_explained():
            return _dead_list(args)
    if not args.batch:
        raise BadInput(
            f"`logweir dead {args.action}` needs a batch id, or 'all'; `logweir dead list` shows them"
        )
    with redis_explained():
        return _show(args) if args.action == "show" else _change(args)


def _change(args: argparse.Namespace) -> int:
    if args.url is not None:
        raise BadInput(f"`logweir dead {args.action}` works on the machine itself; leave out --url")
    from pipeline.redis.connection import connect
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.dead_letters import change_dead_letters

    settings = reached(settings_of(args))
    changed = change_dead_letters(connect(settings), settings, args.batch, args.action, by=user_of_machine())
    word = "sent through the pipeline again" if args.action == "retry" else "discarded"
    if args.json:
        print_json(asdict(changed))
    else:
        out().print(f"{plural(len(changed.batches), 'batch')} {word}", markup=False)
    return 0


def _show(args: argparse.Namespace) -> int:
    """Prints every letter, then raises the last error of an unreadable payload."""
    fault: str | None = None
    for batch in reading(args).dead_batches(args.batch):
        facts = asdict(batch)
        if batch.unreadable is None:
            del facts["unreadable"]
        else:
            fault = batch.unreadable
        print_json(facts)
    if fault is not None:
        raise BadPayload(fault)
    return 0


def _dead_list(args: argparse.Namespace) -> int:
    # A program wants all of them; a person reads a page.
    page = reading(args).dead_letters(args.limit or (None if args.json else PAGE))
    letters, many = page.batches, page.total
    if args.json:
        print_json([asdict(letter) for letter in letters])
        return 0
    console = out()
    for x in letters:
        where = f"{printable(x.source)}:{x.first_line}"
        text = f"{x.lines:,} {'line' if x.lines == 1 else 'lines'} of {printable(x.workload)}, {where}"
        when = f"died in {x.died_in} on {x.died:%Y-%m-%d %H:%M:%S} UTC"
        # Never cut: an id is there to be copied.
        console.print(x.batch_id, style="bold", markup=False, soft_wrap=True)
        console.print(f"  {text}, {when}\n  {printable(x.reason)}", markup=False, soft_wrap=True)
    if many > len(letters):
        console.print(
            f"the newest {len(letters):,} of {many:,} dead batches; --limit N shows more", markup=False
        )
    if not letters:
        console.print("no dead batches")
    return 0
