"""`logweir up`: the embedded stack, until it is told to end."""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from rich.console import Console

from pipeline.commands.common import display, err, print_json, remark, settings_of
from pipeline.commands.drain import STOPPED
from pipeline.commands.extras import missing_for
from pipeline.commands.intake.verb import show_lines
from pipeline.errors import RedisUnavailable
from pipeline.imports import install_hint, uncollected
from pipeline.ledger.ledger import Ledger
from pipeline.logs import set_up
from pipeline.observe.losses import RedisLoss, recent_loss
from pipeline.records.versions import Live, outdated_words
from pipeline.redis.connection import connect
from pipeline.service.access.console_sessions import ConsoleSessions
from pipeline.service.access.keys import SEND, SenderKeys
from pipeline.service.access.own_key import own_key_file
from pipeline.settings import Settings, unknown_variables
from pipeline.settings.listeners import DEFAULT, Listener
from pipeline.settings.values import masked_url
from pipeline.units import listed

if TYPE_CHECKING:
    from pipeline.workers.stack.stack import Stack

CHECK_S: Final = 0.5


def main(args: argparse.Namespace) -> int:
    with uncollected():
        from pipeline.models.registry import Registry
        from pipeline.service.trainings import check_encoder
        from pipeline.workers.stack.stack import Stack

    settings = settings_of(args, default_level="info")
    check_encoder(settings)
    set_up(settings.stack.log_level)
    console = _remarks()
    wanted = settings.intake.listeners
    missing = _missing(console, "intake", "the intake stays off") if wanted else []
    no_api = _missing(console, "api", "the API stays off") if settings.stack.api else []
    no_serve = _missing(console, "serve", "no model is served") if settings.gpu.serve else []
    with Stack(
        settings,
        flower=settings.stack.flower,
        metrics=settings.stack.metrics,
        intake=not missing,
        api=not no_api,
        serve=not no_serve,
    ) as stack:
        while True:
            try:
                closed = _door(stack.settings)
                loss = recent_loss(connect(stack.settings), stack.settings)
                outdated = Registry(connect(stack.settings), stack.settings).outdated()
                break
            except RedisUnavailable:  # for a moment; the workers wait for it, too
                time.sleep(CHECK_S)
                stack.check()
        facts = {
            "ready_s": round(stack.ready_s, 2),
            "redis_url": masked_url(stack.settings.redis.url or ""),
            "data_dir": str(stack.settings.data.dir),
            "workers": {c.name: c.process.pid for c in stack.children},
            "flower": stack.flower_url,
            "metrics": stack.metrics_url,
            "intake": stack.intake.urls,
            "api": stack.api_url,
            "serve": settings.gpu.serve if stack.serves else None,
            "closed": closed,
            "redis_loss": None if loss is None else loss.sentence,
            "outdated_models": [live.version for live in outdated],
        }
        if args.json:
            print_json(facts)
            sys.stdout.flush()
        else:
            where = f" --data-dir {display(stack.settings.data.dir)}" if str(args.data_dir or "") else ""
            console.print(f"ready in {stack.ready_s:.1f} s; Ctrl-C stops it", style="bold", markup=False)
            console.print(f"  send lines:  logweir send FILE{where}", markup=False, soft_wrap=True)
            _show_intake(console, stack, wanted, where)
            console.print(f"  look at it:  logweir status{where}", markup=False, soft_wrap=True)
            if stack.api_url is not None:
                _show_console(console, stack.api_url, stack.settings, where)
                key = display(own_key_file(stack.settings.data.dir))
                console.print(
                    f"  ask it:      logweir --url {stack.api_url} --key @{key} status",
                    markup=False,
                    soft_wrap=True,
                )
            if settings.gpu.serve and not no_serve:
                _show_serving(console, settings.gpu.serve, serves=stack.serves)
            if stack.flower_url is not None:
                console.print(f"  watch it:    {stack.flower_url}", markup=False, soft_wrap=True)
            if stack.metrics_url is not None:
                console.print(f"  metrics:     {stack.metrics_url}", markup=False, soft_wrap=True)
            console.print(
                f"  logs:        {display(stack.settings.data.dir / 'logs')}", markup=False, soft_wrap=True
            )
            _show_attention(console, closed, loss, outdated)
        try:
            while True:
                time.sleep(CHECK_S)
                stack.check()
        except KeyboardInterrupt:
            console.print("stopping: workers finish their step first", markup=False)
    return 0


def _show_attention(
    console: Console, closed: str | None, loss: RedisLoss | None, outdated: Sequence[Live]
) -> None:
    """What an operator should know before anything else is done."""
    sentences = [] if loss is None else [loss.sentence]
    for sentence in (*sentences, *map(outdated_words, outdated)):
        console.print(f"attention: {sentence}", style="yellow", markup=False, soft_wrap=True)
    if closed is not None:
        console.print(
            f"it takes nothing in: {closed}; `logweir drain --undo` opens it",
            style="yellow", markup=False, soft_wrap=True,
        )  # fmt: skip


def _remarks() -> Console:
    """Standard error, where it first says which variables of the environment are ignored."""
    console = err()
    for unknown in unknown_variables():
        remark(console, unknown)
    return console


def _missing(console: Console, extra: str, so: str) -> list[str]:
    """Packages that an extra lacks; said once."""
    missing = missing_for(extra)
    if missing:
        remark(console, f"{so}: it needs {listed(missing)}; {install_hint(extra)}")
    return missing


def _show_serving(console: Console, address: str, *, serves: bool) -> None:
    if serves:
        at = Listener.parse(address, setting="gpu_serve").address
        console.print(f"  models:      {at}/v2", markup=False, soft_wrap=True)
    else:
        remark(console, "gpu_serve is set, and no model is served here: this machine has no GPU")


def _show_console(console: Console, url: str, settings: Settings, where: str) -> None:
    """The way into the console."""
    if not Listener.parse(url, setting="api").loopback:
        console.print(f"  console:     {url} (sign in with a key)", markup=False, soft_wrap=True)
        return
    with suppress(RedisUnavailable):  # `logweir console` prints one later
        link = ConsoleSessions(connect(settings), settings).link(url)
        console.print(f"  console:     {link}", markup=False, soft_wrap=True)
        console.print(
            f"               good once; `logweir console{where}` prints another one",
            markup=False,
            soft_wrap=True,
        )


def _show_intake(console: Console, stack: "Stack", wanted: Sequence[str], where: str) -> None:
    """Where the intake is, how shippers send there, and what a user may not expect."""
    urls, listeners = stack.intake.urls, stack.settings.intake.listeners
    if not urls:
        return
    console.print(f"  take in:     {', '.join(urls)}", markup=False, soft_wrap=True)
    show_lines(console, urls, where)
    if tuple(wanted) == (DEFAULT,) != listeners:
        remark(console, f"{DEFAULT} is taken by another program, so this intake listens at {urls[0]}")
    exposed = [listener for listener in map(Listener.parse, listeners) if listener.needs_key]
    keys = SenderKeys(connect(stack.settings), stack.settings).look() if exposed else []
    if exposed and not any(key.may(SEND) for key in keys):
        remark(
            console,
            f"{exposed[0]} answers nobody before there is a key; `logweir keys add NAME{where}` makes one",
        )


def _door(settings: Settings) -> str | None:
    """Open what `logweir stop` closed; why the door is closed still, None when it is open."""
    ledger = Ledger(connect(settings), settings)
    if ledger.intake.paused_because() == STOPPED:
        ledger.intake.resume()
    return ledger.intake.paused_because()
