"""Sessions that are all normal, made as programs make them: optional steps, retries, loops over items, parts
that run side by side, rare warnings, a long tail of rare kinds, and kinds that come at some hours only."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

DAY_S = 86_400
_SHARED = 12  # templates that all kinds write: log-in, cache, database
_ROLES = ("always", "always", "always", "maybe", "maybe", "retried", "each item", "either", "rare")


@dataclass(frozen=True, slots=True)
class _Step:
    role: str
    events: tuple[int, int]
    chance: float

    def run(self, rng: random.Random, items: int) -> list[int]:
        first, second = self.events
        match self.role:
            case "maybe" | "rare":
                return [first] if rng.random() < self.chance else []
            case "retried":
                times = 0
                while times < 5 and rng.random() < self.chance / 4:
                    times += 1
                return [first, *([second, first] * times)]
            case "each item":
                return [first, second] * items if self.chance < 0.5 else [first] * items
            case "either":
                return [first if rng.random() < self.chance else second]
            case _:
                return [first]


@dataclass(frozen=True, slots=True)
class _Kind:
    """One way through a program. `hours`: of the day, when it comes."""

    steps: tuple[_Step, ...]
    beside: tuple[_Step, ...]  # runs at the same time as the steps after the first
    hours: tuple[int, int]

    @classmethod
    def of(cls, number: int, rng: random.Random) -> "_Kind":
        own = _SHARED + 8 * number

        def step(place: int) -> _Step:
            role = rng.choice(_ROLES)
            events = [own + rng.randrange(8) if rng.random() < 0.6 else rng.randrange(_SHARED) for _ in "ab"]
            chance = rng.uniform(0.0005, 0.01) if role == "rare" else rng.uniform(0.05, 0.95)
            return _Step(role, (events[0], events[1]), chance)

        first = _Step("always", (own, own), 1.0)
        steps = (first, *(step(place) for place in range(rng.randint(2, 8))))
        beside = tuple(step(place) for place in range(rng.randint(1, 3))) if rng.random() < 0.3 else ()
        begin = rng.randrange(24)
        return cls(steps, beside, (begin, begin + (24 if rng.random() < 0.7 else 8)))

    def comes_at(self, second: float) -> bool:
        begin, end = self.hours
        hour = int(second % DAY_S // 3_600)
        return begin <= hour < end or begin <= hour + 24 < end

    def run(self, rng: random.Random) -> tuple[int, ...]:
        items = min(40, 1 + int(rng.expovariate(0.6)))
        one = [event for step in self.steps[1:] for event in step.run(rng, items)]
        other = [event for step in self.beside for event in step.run(rng, items)]
        turns = [True] * len(one) + [False] * len(other)
        rng.shuffle(turns)
        left, right = iter(one), iter(other)
        return (self.steps[0].events[0], *(next(left if turn else right) for turn in turns))


@dataclass(slots=True)
class World:
    """A program with so many kinds of sessions, the popular ones far more often than the rare ones."""

    kinds: int
    seed: int
    made: list[_Kind] = field(init=False)
    weights: list[float] = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(f"{self.seed} {self.kinds}")
        self.made = [_Kind.of(number, rng) for number in range(self.kinds)]
        self.weights = list(accumulate((place + 1) ** -1.1 for place in range(self.kinds)))

    def sessions(
        self, number: int, *, begin_s: float, seconds: float, seed: int
    ) -> Iterator[tuple[int, ...]]:
        """So many of a span of time."""
        rng = random.Random(f"{self.seed} {seed}")
        while number:
            (kind,) = rng.choices(self.made, cum_weights=self.weights)
            if kind.comes_at(begin_s + rng.random() * seconds):
                number -= 1
                yield kind.run(rng)
