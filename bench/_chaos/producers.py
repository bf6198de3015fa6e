"""Who sends lines during a chaos run, and what they were told.

A producer repeats a batch, under the same id and with the same lines, until the answer says that the batch is
in. The history has every try before it is made and every answer, so that lines of a producer that died are
known too: its death is a violation. Every line ends with its own mark, workload and number."""

import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol

import redis

from bench._chaos.history import History
from bench._chaos.poison.sitecustomize import HANG, KILL
from pipeline.errors import LogweirError
from pipeline.messages.submit import Submit
from pipeline.producer import Producer
from pipeline.records.delivery import Accepted, Full, Stage
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

PAUSE_S: Final = 0.25  # after an exception, before the same batch is sent again
OLD_S: Final = 86_400.0  # how old the lines of the workload that is read up are: it waits behind fresh ones
NEW_SHARE: Final = 0.4  # of the batches hold lines that nobody has seen
NEW_LINES: Final = 4
_ENDED: Final = (b"stored", b"dead", b"discarded", b"skipped")


def known(rng: random.Random) -> str:
    """A line of a healthy service; masked, there are 40 of them."""
    words = ("cart", "search", "login", "stock", "price", "mail", "image", "audit")
    verbs = ("served", "cached", "stored", "checked", "queued")
    return (
        f"{rng.choice(words)} {rng.choice(verbs)} request {rng.randrange(10**6)} "
        f"for 10.0.{rng.randrange(250)}.7 in {rng.randrange(900)} ms label=normal"
    )


def unseen(rng: random.Random) -> str:
    """A line whose masked form is new, told by its words alone."""
    name = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=9))
    return f"module {name} says {name[::-1]} label=new"


def marked(text: str, workload: str, number: int, when: float) -> str:
    stamp = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{stamp} INFO app: {text} mark={workload}#{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """An accepted batch, for whoever waits until it is stored."""

    batch_id: str
    at: float  # monotonic: when the answer came
    known: bool


class Takes(Protocol):
    """Where a sender's batches go: the product's producer, or a client of the intake."""

    def send(self, lines: Sequence[str], /, *, workload: str, batch_id: str) -> Accepted | Full:
        """Raises LogweirError when it is unknown whether the batch is in."""


@dataclass(slots=True)
class Sender:
    """Sends batches of numbered lines of one workload and notes every answer. For one thread."""

    name: str
    workload: str
    history: History
    producer: Takes
    accepted: Callable[[Sent], None] | None = None
    written: int = 0
    batches: int = 0
    refusals: int = 0
    stop: threading.Event = field(default_factory=threading.Event)  # then the batch in hand is given up

    def send(
        self, texts: Sequence[str], *, age_s: float = 0.0, poison: str = "", poison_at: int | None = None
    ) -> str:
        """Until it is accepted; the batch id. Lines count from where the last batch ended."""
        self.batches += 1
        first, batch_id, now = self.written + 1, f"{self.name}-{self.batches}", time.time() - age_s
        self.written += len(texts)
        lines = [marked(text, self.workload, first + n, now) for n, text in enumerate(texts)]
        note = partial(
            self.history.note,
            "send",
            who=self.name,
            id=batch_id,
            workload=self.workload,
            first=first,
            lines=len(lines),
            poison=poison,
            poison_line=None if poison_at is None else first + poison_at,
        )
        while not self.stop.is_set():
            note(answer="asked")
            answer, wait_s = self._try(lines, batch_id)
            note(answer=answer)
            if answer in ("accepted", "duplicate"):
                if self.accepted is not None and not poison and not age_s:
                    plain = not any("label=new" in text for text in texts)
                    self.accepted(Sent(batch_id=batch_id, at=time.monotonic(), known=plain))
                break
            self.stop.wait(wait_s)
        return batch_id

    def _try(self, lines: list[str], batch_id: str) -> tuple[str, float]:
        try:
            answer = self.producer.send(lines, workload=self.workload, batch_id=batch_id)
        except LogweirError:
            return "unknown", PAUSE_S
        except BaseException:
            self.history.note("died", who=self.name, id=batch_id, why=traceback.format_exc())
            raise
        if isinstance(answer, Full):
            self.refusals += 1
            return "full", answer.retry_after_s
        return "duplicate" if answer.duplicate else "accepted", 0.0


class Push(threading.Thread):
    """A service that logs at a steady rate, until `finish`; the batch in hand is still sent."""

    def __init__(self, sender: Sender, *, every_s: float, seed: int, age_s: float = 0.0) -> None:
        super().__init__(name=sender.name, daemon=True)
        self.sender = sender
        self.every_s = every_s
        self.age_s = age_s
        self.rng = random.Random(f"{seed} {sender.name}")
        self.finishing = threading.Event()

    def run(self) -> None:
        while not self.finishing.is_set():
            began = time.monotonic()
            self.sender.send(batch(self.rng, self.rng.randint(20, 200)), age_s=self.age_s)
            self.finishing.wait(max(0.0, self.every_s - (time.monotonic() - began)))

    def finish(self) -> None:
        self.finishing.set()


def batch(rng: random.Random, lines: int) -> list[str]:
    texts = [known(rng) for _ in range(lines)]
    if rng.random() < NEW_SHARE:
        for place in rng.sample(range(lines), min(lines, NEW_LINES)):
            texts[place] = unseen(rng)
    return texts


class Poisoner:
    """Sends what must not be stored: a line that kills, a line that hangs, a payload that cannot be read."""

    WORKLOAD: Final = "poisoned"
    CORRUPTED: Final = "corrupted"

    def __init__(self, history: History, settings: Settings, direct: Settings) -> None:
        """`direct`: past the proxy, so that a payload is corrupt before anybody is woken for it."""
        self.client = connect(direct)
        self.keys = Keys(direct.redis.key_prefix)
        self.normal = Sender("poison", self.WORKLOAD, history, Producer.connect(settings))
        silent = Producer.connect(direct)
        self.submit = silent.submit
        silent.submit = _Silent(silent.submit.app, silent.submit.client, direct)
        self.corrupt = Sender("corrupt", self.CORRUPTED, history, silent)
        self.lock = threading.Lock()

    def send(self, kind: str, rng: random.Random) -> str:
        """The id of the poisoned batch."""
        with self.lock:
            if kind == "corrupt":
                return self._corrupt(rng)
            # A hang takes `step_s` and as much rest with every attempt, so that batch is small.
            texts = [known(rng) for _ in range(16 if kind == "kill" else 2)]
            at = rng.randrange(len(texts))
            texts[at] = f"this line is {KILL if kind == 'kill' else HANG} label=poison"
            return self.normal.send(texts, poison=kind, poison_at=at)

    def _corrupt(self, rng: random.Random) -> str:
        batch_id = self.corrupt.send([known(rng) for _ in range(rng.randint(2, 40))], poison="corrupt")
        key = self.keys.payload(batch_id)
        how, noise = rng.randrange(4), rng.randbytes(400)
        while not self.corrupt.stop.is_set():
            try:
                whole: Any = self.client.get(key) or b""
                damaged = (b"", b"\x00" * 64, whole[: len(whole) // 2], noise)[how]
                self.client.set(key, damaged, xx=True)  # it is gone where the sweeper was quicker
                break
            except redis.RedisError:
                self.corrupt.stop.wait(PAUSE_S)
        self.submit.wake(Stage.INGEST, batch_id)
        return batch_id

    def buried(self) -> bool:
        """Nothing of it is under way; False where Redis does not answer."""
        try:
            for workload in (self.WORKLOAD, self.CORRUPTED):
                raw: Any = self.client.hgetall(self.keys.totals(workload))
                total = {name: int(value) for name, value in raw.items()}
                if total.pop(b"accepted", 0) != sum(total.get(name, 0) for name in _ENDED):
                    return False
        except redis.RedisError:
            return False
        return True

    def end(self) -> None:
        self.normal.stop.set()
        self.corrupt.stop.set()


class _Silent(Submit):
    """Wakes nobody."""

    def wake(self, *_: Any, **__: Any) -> bool:
        return False

    def wake_new(self, *_: Any, **__: Any) -> bool:
        return False
