"""`logweir intake`: where lines are taken in, and how each shipper sends there."""

import argparse
from collections.abc import Sequence

from rich.console import Console

from pipeline.commands.common import out, print_json, reached, redis_explained, settings_of
from pipeline.commands.intake import explain
from pipeline.errors import BadInput
from pipeline.redis.connection import connect
from pipeline.service.access.keys import SEND, SenderKeys
from pipeline.service.access.snippets import intake_urls, of_scheme, snippet_lines, snippet_text
from pipeline.units import plural


def main(args: argparse.Namespace) -> int:
    if args.explain:
        return explain.main(args)
    if args.rules is not None:
        raise BadInput("--rules belongs to --explain; a running intake takes the file of workload_rules")
    settings = reached(settings_of(args), writes=False)
    urls = intake_urls(settings)
    with redis_explained():
        keys = sum(key.may(SEND) for key in SenderKeys(connect(settings), settings).look())
    if args.json:
        print_json({"listeners": urls, "keys": keys, "snippets": dict(snippet_lines(urls))})
        return 0
    if not urls:
        raise BadInput("the intake is off; set intake, such as http://127.0.0.1:4318, and restart the stack")
    if args.snippets:
        if of_scheme(urls, "http") is None:
            raise BadInput("these shippers send over HTTP; add http://127.0.0.1:4318 to the setting intake")
        out().print(snippet_text(args.snippets, urls, keyed=bool(keys)), markup=False, soft_wrap=True, end="")
        return 0
    console = out()
    for url in urls:
        console.print(f"lines come in at {url}", markup=False, soft_wrap=True)
    rule = (
        f"every request needs one of {plural(keys, 'key')}" if keys else "there is no key, and none is needed"
    )
    console.print(
        f"{rule}; `logweir keys list` shows them" if keys else f"{rule} on this machine", markup=False
    )
    show_lines(console, urls)
    return 0


def show_lines(console: Console, urls: Sequence[str], where: str = "") -> None:
    """A line for each shipper. `where`: the flag that names the stack to other commands."""
    lines = snippet_lines(urls)
    for shipper, line in lines:
        console.print(f"    {shipper:<16} {line}", markup=False, soft_wrap=True)
    if lines:
        console.print(
            f"    whole configurations: logweir intake --snippets NAME{where}", markup=False, soft_wrap=True
        )
