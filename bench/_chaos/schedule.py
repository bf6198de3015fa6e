"""Which fault comes when: made from the seed before the run begins, so that the same seed is the same run.

The kinds are dealt like cards from a shuffled deck, so that even a short run meets most of them, rare ones
too. Where faults come one by one, every kind comes once before any comes again."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench._chaos.history import History

EVERY_S: Final = 3.0  # 1,200 faults an hour
FIRST_S: Final = 3.0
# Poison takes its attempts and halvings to be buried: none right before the end, which would only wait for
# it.
POISON_BEFORE_END_S: Final = 60.0
WORKERS: Final = ("ingest", "infer-cpu", "drain", "store")
SOURCES: Final = ("intake", "kafka", "nats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a schedule. `for_s`: how long it lasts until it is healed; 0 for what is over at once.
    `machine`: the number of the one whose processes it hits."""

    n: int
    at_s: float
    kind: str
    target: str = ""
    for_s: float = 0.0
    machine: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a kind of fault is dealt.

    `sole`: it takes away what there is only one of, so lines can flow again only after it is healed.
    `waits_for`: the time-out of the product that may have to pass first: `lease` of the template tree, whose
    holder is gone (a stack that is killed takes it along), or `socket` of connections whose answers are lost.
    """

    cards: int
    for_s: tuple[float, float] = (0.0, 0.0)
    targets: tuple[str, ...] = ("",)
    sole: bool = False
    waits_for: str = ""


# A target is role/number (of those that run, modulo), with :child for the process of its pool.
_EACH: Final = tuple(f"{role}/{n}" for role in WORKERS for n in (0, 1))
_CHILDREN: Final = ("infer-cpu/0:child", "infer-cpu/1:child", "train/0:child")

KINDS: Final[dict[str, Kind]] = {
    "kill": Kind(cards=6, targets=(*_EACH, *_CHILDREN, "train/0")),
    "kill_beat": Kind(cards=1, targets=("beat/0",)),
    "kill_writer": Kind(cards=2, targets=("drain",), waits_for="lease"),
    "kill_supervisor": Kind(cards=1, sole=True, waits_for="lease"),
    "kill_stack": Kind(cards=1, sole=True, waits_for="lease"),
    "kill_follower": Kind(cards=1),
    "kill_source": Kind(cards=3, targets=SOURCES),
    "stop_source": Kind(cards=2, for_s=(2.0, 20.0), targets=SOURCES),
    "break_intake": Kind(cards=3, for_s=(0.5, 4.0), targets=("cut", "refuse", "half_open")),
    "stop": Kind(cards=3, for_s=(12.0, 20.0), targets=(*_EACH, "train/0:child")),
    "stop_writer": Kind(cards=1, for_s=(16.0, 20.0), targets=("drain",), waits_for="lease"),
    "stop_role": Kind(cards=1, for_s=(12.0, 16.0), targets=WORKERS, sole=True, waits_for="lease"),
    "kill_redis": Kind(cards=2, for_s=(0.1, 4.0), sole=True),
    "stop_redis": Kind(cards=2, for_s=(1.0, 6.0), sole=True),
    "cut": Kind(cards=4),
    "refuse": Kind(cards=2, for_s=(0.5, 4.0), sole=True),
    "delay": Kind(cards=2, for_s=(2.0, 6.0), targets=("0.05", "0.1", "0.3")),
    "half_open": Kind(cards=2, targets=("0.3", "0.6", "1.0"), waits_for="socket"),
    "client_kill": Kind(cards=2, targets=("normal", "pubsub")),
    "twice": Kind(cards=4),
    "drop": Kind(cards=4),
    "unacked": Kind(cards=2),
    "garbage": Kind(cards=2),
    "disk_full": Kind(cards=2, for_s=(3.0, 8.0), sole=True),
    "fill": Kind(cards=1, for_s=(3.0, 6.0), sole=True),
    "pause": Kind(cards=2, for_s=(3.0, 15.0), sole=True),
    "poison": Kind(cards=3, targets=("kill", "hang", "corrupt")),
}


# With several machines no process is the only one of its kind.
_MACHINES: Final[dict[str, Kind]] = {
    **{name: replace(KINDS[name], sole=False) for name in ("kill_supervisor", "stop_role")},
    "kill_stack": replace(KINDS["kill_stack"], cards=2, sole=False),
    "stop_machine": Kind(cards=1, for_s=(12.0, 20.0), waits_for="lease"),
}
# Shorter than the sentinels wait (2 s) as well as longer; a fail-over takes some seconds more.
_SENTINEL: Final[dict[str, Kind]] = {
    "kill_redis": replace(KINDS["kill_redis"], for_s=(0.1, 10.0)),
    "stop_redis": replace(KINDS["stop_redis"], for_s=(1.0, 10.0)),
    "kill_replica": Kind(cards=1, for_s=(0.1, 6.0)),
    "stop_replica": Kind(cards=1, for_s=(1.0, 8.0)),
    "kill_sentinel": Kind(cards=1, for_s=(0.1, 6.0), targets=("0", "1", "2")),
    "stop_sentinel": Kind(cards=1, for_s=(1.0, 8.0), targets=("0", "1", "2")),
}
_FOLDER: Final[dict[str, Kind]] = {"store_away": Kind(cards=2, for_s=(2.0, 8.0), sole=True)}
_BUCKET: Final[dict[str, Kind]] = {
    "store_away": Kind(cards=2, for_s=(1.0, 8.0), sole=True),
    "store_slow": Kind(cards=2, for_s=(2.0, 6.0), targets=("0.05", "0.2", "1.0")),
    "store_errors": Kind(cards=2, for_s=(1.0, 8.0), targets=("500", "503"), sole=True),
    "store_full": Kind(cards=2, for_s=(3.0, 8.0), sole=True),
    "store_cut": Kind(cards=2),
    "store_half_open": Kind(cards=1, targets=("0.3", "1.0"), waits_for="socket"),
    "stop_store": Kind(cards=1, for_s=(2.0, 8.0), sole=True),
    "kill_store": Kind(cards=1, for_s=(0.1, 3.0), sole=True),
}


def kinds_of(*, machines: int, store: str, sentinel: bool) -> dict[str, Kind]:
    """The kinds of fault of such a world; of one machine on its own disk: KINDS."""
    found = KINDS | (_MACHINES if machines > 1 else {}) | (_SENTINEL if sentinel else {})
    if store == "s3":
        found = {name: kind for name, kind in found.items() if name != "disk_full"} | _BUCKET
    return found | _FOLDER if store == "file" else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Deck:
    """The kinds of fault that are dealt, and the number of machines that they hit."""

    kinds: Mapping[str, Kind]
    machines: int = 1

    def cards(self, rng: random.Random) -> Iterator[str]:
        """Names of kinds for ever, one shuffled deck after the other."""
        while True:
            deck = [name for name, kind in self.kinds.items() for _ in range(kind.cards)]
            rng.shuffle(deck)
            yield from deck

    def fault(self, n: int, at_s: float, name: str, rng: random.Random) -> Fault:
        kind = self.kinds[name]
        return Fault(
            n=n,
            at_s=round(at_s, 3),
            kind=name,
            target=rng.choice(kind.targets),
            for_s=round(rng.uniform(*kind.for_s), 3),
            machine=rng.randrange(self.machines) if self.machines > 1 else 0,
        )


ONE_MACHINE: Final = Deck(kinds=KINDS)


def schedule(
    seed: int, minutes: float, every_s: float = EVERY_S, deck: Deck = ONE_MACHINE
) -> tuple[Fault, ...]:
    """The faults of a run, in order."""
    rng = random.Random(seed)
    cards, at_s = deck.cards(rng), FIRST_S
    found: list[Fault] = []
    while at_s < minutes * 60:
        name = next(name for name in cards if name != "poison" or at_s < minutes * 60 - POISON_BEFORE_END_S)
        found.append(deck.fault(len(found) + 1, at_s, name, rng))
        at_s += rng.uniform(0.4, 1.6) * every_s
    return tuple(found)


def one_by_one(
    seed: int, minutes: float, every_s: float = EVERY_S, deck: Deck = ONE_MACHINE
) -> tuple[Fault, ...]:
    """The faults of a run in which each waits until the last one is over: `at_s` is the earliest.

    Each kind once in every round. Poison, which may take minutes to be buried, ends a round.
    """
    rng = random.Random(seed)
    found: list[Fault] = []
    while (at_s := FIRST_S + len(found) * every_s) < minutes * 60:
        if len(found) % len(deck.kinds) == 0:
            names = [name for name in deck.kinds if name != "poison"]
            rng.shuffle(names)
            names.append("poison")
        found.append(deck.fault(len(found) + 1, at_s, names[len(found) % len(deck.kinds)], rng))
    return tuple(found)


def replay(path: Path) -> tuple[int, float, tuple[Fault, ...]]:
    """Seed, minutes and faults of a history. Raises ValueError for a file that is none."""
    begin, found = None, []
    for item in History.read(path):
        if item["op"] == "begin":
            begin = item
        elif item["op"] in ("fault", "missed"):
            found.append(
                Fault(
                    n=item["n"],
                    at_s=item["at_s"],
                    kind=item["kind"],
                    target=item["target"],
                    for_s=item["for_s"],
                    machine=item.get("machine", 0),
                )
            )
    if begin is None:
        raise ValueError(f"{path} does not begin a run; give the history.jsonl of a chaos run")
    return begin["seed"], begin["minutes"], tuple(sorted(found, key=lambda fault: fault.n))
