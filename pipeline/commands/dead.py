"""`logweir dead list | show | retry | discard`: batches that could not be processed."""

import argparse
from dataclasses import asdict
from typing import Any, Final

from pipeline.commands.common import out, print_json, printable, reached, redis_explained, settings_of
from pipeline.errors import BadInput, BadPayload, TooNew
from pipeline.ledger.ledger import Ledger
from pipeline.records.delivery import DeadLetter
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sources.pushed import framed
from pipeline.units import plural

PAGE: Final = 100  # batches listed at once


def main(args: argparse.Namespace) -> int:
    settings = reached(settings_of(args))
    with redis_explained():
        return _dead(args, settings)


def _dead(args: argparse.Namespace, settings: Settings) -> int:
    ledger = Ledger(connect(settings), settings)
    if args.action == "list":
        if args.batch:
            raise BadInput(
                f"`logweir dead list` takes no batch id; `logweir dead show {args.batch[0]}` shows one"
            )
        return _dead_list(args, ledger)
    letters = _chosen(args, ledger)
    if args.action == "show":
        return _show(ledger, letters)
    act, word = (
        (ledger.dead_letters.retry, "sent through the pipeline again")
        if args.action == "retry"
        else (ledger.dead_letters.discard, "discarded")
    )
    # Another operator may be quicker with a batch.
    changed = [letter.batch_id for letter in letters if act(letter.batch_id)]
    if args.json:
        print_json({"batches": changed, "action": args.action})
    else:
        out().print(f"{plural(len(changed), 'batch')} {word}", markup=False)
    return 0


def _show(ledger: Ledger, letters: list[DeadLetter]) -> int:
    """Prints every letter, then raises the last error of an unreadable payload."""
    fault: BadPayload | TooNew | None = None
    for letter in letters:
        facts: dict[str, Any] = asdict(letter)
        try:
            facts["records"] = framed(ledger.payload(letter.batch_id))[0]["raw"].head(100).to_list()
        except (BadPayload, TooNew) as exc:
            facts |= {"records": [], "unreadable": str(exc)}
            fault = exc
        print_json(facts)
    if fault is not None:
        raise fault
    return 0


def _chosen(args: argparse.Namespace, ledger: Ledger) -> list[DeadLetter]:
    """The dead letters that are meant. Raises BadInput before anything is done when one of them is none."""
    if not args.batch:
        raise BadInput(
            f"`logweir dead {args.action}` needs a batch id, or 'all'; `logweir dead list` shows them"
        )
    if args.batch == ["all"]:
        return _all_dead(ledger)
    found = {batch_id: ledger.dead_letters.find(batch_id) for batch_id in args.batch}
    unknown = [batch_id for batch_id, letter in found.items() if letter is None]
    if unknown:
        undone = "" if len(found) == 1 else ", so nothing was done"
        raise BadInput(f"there is no dead batch {unknown[0]!r}{undone}; `logweir dead list` shows them")
    return [letter for letter in found.values() if letter is not None]


def _all_dead(ledger: Ledger) -> list[DeadLetter]:
    """The letters of this moment, so that a retried batch that dies again is not taken twice."""
    return ledger.dead_letters.newest(limit=max(1, int(ledger.client.zcard(ledger.keys.dead))))


def _dead_list(args: argparse.Namespace, ledger: Ledger) -> int:
    many = int(ledger.client.zcard(ledger.keys.dead))
    # A program wants all of them; a person reads a page.
    letters = ledger.dead_letters.newest(limit=args.limit or (max(1, many) if args.json else PAGE))
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
