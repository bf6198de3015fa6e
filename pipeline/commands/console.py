"""`logweir console`: a link that opens the console in a browser of this machine, good once."""

import argparse

from pipeline.commands.common import out, print_json, reached, settings_of
from pipeline.errors import BadInput
from pipeline.redis.attach import running
from pipeline.redis.connection import connect
from pipeline.service.access.console_sessions import LINK_S, ConsoleSessions
from pipeline.settings import Settings
from pipeline.settings.listeners import Listener


def main(args: argparse.Namespace) -> int:
    url = console_link(reached(settings_of(args)))
    if args.json:
        print_json({"url": url, "good_for_s": LINK_S})
    else:
        out().print(url, markup=False, highlight=False, soft_wrap=True)
    return 0


def console_link(settings: Settings) -> str:
    """A new link. Raises BadInput where no console is on this machine's loopback, RedisUnavailable."""
    stack = running(settings.data.dir) or {}
    address = str(stack.get("api") or settings.stack.api or "")
    if not address:
        raise BadInput(
            "no API runs here, and the console is a part of it; set api, such as http://127.0.0.1:4380"
        )
    listener = Listener.parse(address, setting="api")
    if not listener.loopback:
        raise BadInput(
            f"links without a key are good on loopback alone, and the console is at {address}; open it there and "
            "sign in with a key"
        )
    return ConsoleSessions(connect(settings), settings).link(listener.address)
