"""Real lines as requests of many workloads: in a heap, or by a timetable."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench._requests import Part, Protocol, Record, records_of
from bench._shipper import Request

TICK_US: Final = 1_000_000  # between the times of two requests that are sent as fast as possible
LARGEST: Final = "BGL-100k"  # the lines of a lone workload


def pieces(sources: dict[str, list[Record]], lines: int) -> dict[str, list[list[Record]]]:
    """The records of each file in pieces of so many physical lines, or a few more."""
    found: dict[str, list[list[Record]]] = {}
    for name, records in sources.items():
        found[name], size = [[]], 0
        for record in records:
            if size >= lines:
                found[name].append([])
                size = 0
            found[name][-1].append(record)
            size += record.raw.count("\n") + 1
    return found


def read_all(made: Sequence[Path]) -> dict[str, list[Record]]:
    """The records of files that `write_cycles` wrote, by the name of their set."""
    return {path.stem: records_of(path) for path in made}


def parts_of(found: dict[str, list[list[Record]]], workloads: int, at_us: int) -> list[Part]:
    """Each piece in one of so many workloads. A workload has lines of one set; large sets have more of them.

    The order is random, as senders do not know each other."""
    if workloads == 1:
        found = {LARGEST: found[LARGEST]}
    total = sum(map(len, found.values()))
    spare = max(0, workloads - len(found))
    apps = {name: 1 + spare * len(several) // total for name, several in found.items()}
    apps[LARGEST] += max(0, workloads - sum(apps.values()))
    parts: list[tuple[str, list[Record]]] = []
    for name, several in found.items():
        names = [f"{name.lower()}-{n}" for n in range(apps[name])]
        parts += zip(itertools.cycle(names), several, strict=False)
    random.Random(workloads).shuffle(parts)
    return [Part(app, piece, at_us + n * TICK_US) for n, (app, piece) in enumerate(parts)]


def heap(
    protocol: Protocol, sources: dict[str, list[Record]], *, lines: int, workloads: int, now: float
) -> list[Request]:
    """Requests of one workload and so many lines each. The times of the lines lie before `now`."""
    found = pieces(sources, lines)
    first = round(now * 1e6) - sum(map(len, found.values())) * TICK_US
    return [protocol.request([part]) for part in parts_of(found, workloads, first)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """Every workload has so many records each `every_s` seconds, and the requests are evenly spread over that
    time. A request has those of `together` workloads."""

    workloads: int
    lines: int
    every_s: float
    together: int = 1

    def requests(
        self, protocol: Protocol, sources: dict[str, list[Record]], *, begins: float, seconds: float
    ) -> list[Request]:
        """Records of one line each; their times begin when the request is due. A workload has one set."""
        sets = itertools.cycle(
            [record for record in found if "\n" not in record.raw] for found in sources.values()
        )
        streams = [itertools.cycle(found) for found in itertools.islice(sets, self.workloads)]
        groups = self.workloads // self.together
        made = []
        for turn, group in itertools.product(range(round(seconds / self.every_s)), range(groups)):
            due = begins + (turn + group / groups) * self.every_s
            parts = [
                Part(
                    f"app-{number}",
                    list(itertools.islice(streams[number], self.lines)),
                    round(due * 1e6) + number * self.lines,
                )
                for number in range(group * self.together, (group + 1) * self.together)
            ]
            made.append(protocol.request(parts, due=due))
        return made
