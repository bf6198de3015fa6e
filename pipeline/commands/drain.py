"""`logweir drain` and `logweir stop`: let nothing more in, wait until all that is in is stored; then end the
stack.

Warming batches and dead letters stay in Redis, and the next `logweir up` goes on with
them. Nothing is lost whatever way this ends. A Redis that other machines may use too has one door for all of
them: with it `stop` only ends what runs here."""

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from pipeline.commands.common import err, out, print_json, printable, reached, redis_explained, settings_of
from pipeline.errors import BadInput, NotDrained, RedisUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.messages.routing import STAGE_QUEUES
from pipeline.observe.embedded import private_url
from pipeline.observe.presence import Presence
from pipeline.records.delivery import Stage
from pipeline.redis.attach import running
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.units import plural
from pipeline.workers.stack.data_dir import holder

DRAINED: Final = "an operator drains the pipeline (`logweir drain`)"
# The next `logweir up` opens a door that was closed with these words, and no other.
STOPPED: Final = "the stack is being stopped (`logweir stop`)"
LOOK_S: Final = 0.1
# A worker that died is back sooner; a stage that nobody serves for so long will not get empty.
UNSERVED_S: Final = 20.0
# The supervisor gives its workers 12 s, and then Redis.
END_S: Final = 60.0
# A Redis of others that is restarted is back sooner.
AWAY_S: Final = 60.0
# A door that `stop` closed opens by itself when that command was killed; the end of the stack takes END_S at
# most.
DOOR_S: Final = 90.0
RENEW_S: Final = 20.0
GONE_S: Final = 1.0
QUIET_S: Final = 2.0
# Stored lines are safe; observations that the watcher has not read wait in Redis for the next start.
WATCHED_S: Final = 10.0
REMEDY: Final = "`logweir status` says more, `logweir stop --now` ends the stack as it is and loses nothing"


def main(args: argparse.Namespace) -> int:
    return _stop(args) if args.verb == "stop" else _drain(args)


def _drain(args: argparse.Namespace) -> int:
    own_settings = settings_of(args)
    settings = reached(own_settings)
    with redis_explained():
        drain = Drain.of(settings)
        if args.undo:
            opened = drain.ledger.intake.resume()
            _say(
                args, {"open": True, "was_closed": opened}, "open again" if opened else "it was open already"
            )
            return 0
        ended = (
            None
            if own_settings.redis.url is not None
            else _ended(own_settings, int(str(_stack(own_settings)["pid"])))
        )
        with drain.closing(DRAINED, leave_closed=True):
            waited = drain.wait(args.timeout, ended=ended)
        text = f"drained in {waited:.1f} s: everything that was accepted is stored; "
        text += "`logweir drain --undo` opens it again"
        _say(args, {"drained": True, "waited_s": round(waited, 1), **drain.remaining()}, text)
    return 0


def _stop(args: argparse.Namespace) -> int:
    own_settings = settings_of(args)
    state = _stack(own_settings)
    pid = int(str(state["pid"]))
    waited = 0.0
    # The stack's own Redis, whatever REDIS_URL says here.
    its = own_settings.replace(redis_url=str(state["redis_url"]), key_prefix=str(state["key_prefix"]))
    shared = its.redis.url != private_url(own_settings.data.dir)
    drains = not shared and not args.now
    if drains:
        with redis_explained():
            drain = Drain.of(its)
            with _saying("broken off; the stack runs on"), drain.closing(STOPPED, leave_closed=False):
                waited = drain.wait(args.timeout, ended=_ended(own_settings, pid), keep=STOPPED)
    with _saying("the stack is ending; this command no longer waits for it"):
        try:
            _end(own_settings, pid)
        except NotDrained:
            if drains:  # it runs on, so it takes lines in
                with suppress(RedisUnavailable):
                    drain.reopen()
            raise
    text = f"drained in {waited:.1f} s and stopped" if drains else "stopped"
    if shared and not args.now:
        text += "; its Redis is shared, so what waits there is left to others (`logweir drain` waits for all)"
    _say(args, {"stopped": True, "drained": drains, "waited_s": round(waited, 1)}, text)
    return 0


class _Ended(NotDrained):
    """The stack has ended while somebody waited for it, and its Redis with it."""


@contextmanager
def _saying(text: str) -> Iterator[None]:
    """Gives Ctrl-C and SIGTERM the message that the command line prints."""
    try:
        yield
    except Exception:
        raise
    except BaseException as exc:
        exc.args = (text,)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Batches in flight: a sentence, their stages, and the stages that no worker serves."""

    text: str
    stages: tuple[str, ...] = ()
    unserved: tuple[str, ...] = ()


@dataclass(slots=True)
class WaitReport:
    """Progress without a terminal: a line once the wait is long, then a line for each change of stages."""

    began: float = field(default_factory=time.monotonic)
    last: tuple[str, ...] | None = None

    def say(self, text: str, kind: tuple[str, ...]) -> None:
        if kind != self.last and not err().is_terminal and time.monotonic() - self.began > QUIET_S:
            err().print(text, markup=False, soft_wrap=True)
            self.last = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """The door of a pipeline, and what is still behind it. Methods raise RedisUnavailable."""

    ledger: Ledger
    presence: Presence

    @classmethod
    def of(cls, settings: Settings) -> "Drain":
        client = connect(settings)
        return cls(ledger=Ledger(client, settings), presence=Presence(client, settings))

    @contextmanager
    def closing(self, why: str, *, leave_closed: bool) -> Iterator[None]:
        """Close the door; open it again when the wait is broken off, and, unless `leave_closed`, when it
        fails.

        A door that was closed before is left as it was.
        """
        # A pause of `stop` expires by itself; a pause of `drain` does not.
        closes = self.ledger.intake.paused_because() in ((None, STOPPED) if leave_closed else (None,))
        try:
            if closes:  # within the try: Ctrl-C may come when the door is closed and this has not heard so
                self.ledger.intake.pause(why, for_s=None if leave_closed else DOOR_S)
            yield
        except _Ended:
            raise  # the next `logweir up` opens what `stop` closed
        except NotDrained:
            if closes and not leave_closed:
                self._open()
            raise
        except BaseException:
            if closes:
                self._open()
            raise

    def reopen(self) -> None:
        """Open the door that `stop` closed, and no other."""
        if self.ledger.intake.paused_because() == STOPPED:
            self.ledger.intake.resume()

    def _open(self) -> None:
        try:
            self.ledger.intake.resume()
        except RedisUnavailable as exc:
            why = (
                f"broken off, and the door could not be opened ({exc}); `logweir drain --undo` does it later"
            )
            err().print(why, markup=False, soft_wrap=True)
        else:
            err().print("broken off: lines are taken in again", markup=False)

    def wait(
        self, timeout_s: float | None, *, ended: Callable[[], bool] | None, keep: str | None = None
    ) -> float:
        """Until nothing is in flight; how long it took. Raises NotDrained when it does not get empty.

        `ended` tells whether the embedded stack has ended; None: it is a Redis of others, which may be away
        for AWAY_S. `keep`: a door that was closed with these words stays closed meanwhile."""
        began = served = answered = checked = renewed = stored = time.monotonic()
        report = WaitReport()
        with err().status("draining") as line:
            while True:
                now = time.monotonic()
                try:
                    in_flight = self.in_flight()
                    if keep is not None and now - renewed > RENEW_S:
                        self.ledger.intake.stay_paused(keep, for_s=DOOR_S)
                        renewed = now
                    answered = now
                except RedisUnavailable as exc:
                    in_flight = InFlight(text=str(exc), stages=("Redis is away",))
                    if ended is None and now - answered > AWAY_S:
                        raise NotDrained(
                            f"Redis has not answered for {AWAY_S:.0f} s; whatever is in it is kept, look "
                            "after it and drain again"
                        ) from exc
                if in_flight is None:
                    if not self.watcher_lag() or now - stored > WATCHED_S:
                        return now - began
                    line.update("draining: sessions and rates are looked at")
                    time.sleep(LOOK_S)
                    continue
                stored = now
                if ended is not None and now - checked > GONE_S:
                    checked = now
                    if ended():
                        raise _Ended("the stack has ended meanwhile; nothing is lost, `logweir up` goes on")
                line.update(f"draining: {printable(in_flight.text)}")
                report.say(f"draining: {printable(in_flight.text)}", in_flight.stages)
                if not in_flight.unserved:
                    served = now
                elif now - served > UNSERVED_S:
                    who = " and ".join(in_flight.unserved)
                    raise NotDrained(f"{in_flight.text}, and no worker serves {who}; {REMEDY}")
                if timeout_s is not None and now - began > timeout_s:
                    raise NotDrained(f"not drained within {timeout_s:g} s: {in_flight.text}; {REMEDY}")
                time.sleep(LOOK_S)

    def watcher_lag(self) -> int:
        """Observations that the watcher has not read; 0 while Redis is away."""
        try:
            return self.ledger.backlog.watcher_lag()
        except RedisUnavailable:
            return 0

    def in_flight(self) -> "InFlight | None":
        """None when nothing is in flight."""
        counts = self.ledger.backlog.counts()
        batches = counts.get("batches", 0)
        if batches <= 0:
            return None
        waits = {stage: n for stage in Stage if (n := counts.get(f"stage:{stage}", 0)) > 0}
        where = ", ".join(f"{stage} {n}" for stage, n in waits.items())
        trouble = self.presence.trouble()
        queues = {queue for worker in self.presence.live() for queue in worker.queues}
        return InFlight(
            text=f"{plural(batches, 'batch')} left ({where})" + (f"; {trouble.reason}" if trouble else ""),
            stages=(*waits, *([trouble.stage] if trouble else [])),
            unserved=tuple(stage for stage in waits if queues.isdisjoint(STAGE_QUEUES[stage])),
        )

    def remaining(self) -> dict[str, int]:
        """Numbers of warming batches and dead letters, which stay in Redis."""
        return {
            "warming_batches": self.ledger.backlog.warming(),
            "dead_batches": len(self.ledger.dead_letters.newest()),
        }


def _stack(settings: Settings) -> dict[str, object]:
    """The state file of the embedded stack. Raises BadInput when none runs."""
    state = running(settings.data.dir)
    if state is None or holder(settings.data.dir) != int(str(state["pid"])):
        raise BadInput(f"no logweir stack runs on {settings.data.dir}; name its --data-dir")
    return state


def _ended(settings: Settings, pid: int) -> Callable[[], bool]:
    return lambda: holder(settings.data.dir) != pid


def _end(settings: Settings, pid: int) -> None:
    """Raises NotDrained when the stack does not end."""
    ended = _ended(settings, pid)
    # Looked up again: it may have ended since it was found, and another process may have its number.
    if ended():
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    report = WaitReport()
    text = "stopping: workers finish their step"
    with err().status(text):
        while not ended():
            report.say(text, ())
            if time.monotonic() > deadline:
                raise NotDrained(
                    f"process {pid} did not end within {END_S:.0f} s; see {settings.data.dir / 'logs'}"
                )
            time.sleep(LOOK_S)


def _say(args: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    if args.json:
        print_json(facts)
    else:
        out().print(text, markup=False, soft_wrap=True)
