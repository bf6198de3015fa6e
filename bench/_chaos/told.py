"""What a history tells: every batch with its answer, every followed file, every fault; and traces cut out of
it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

from bench._chaos.history import History

Operation = Mapping[str, Any]

# More violations of one kind are summed up: the first ones tell what is wrong.
MOST: Final = 25
# A trace longer than this is not read by anybody.
TRACE_MOST: Final = 40
# Faults that may have to do with an operation: those from a little before it to when what they broke is
# mended.
BEFORE_S: Final = 5.0
AFTER_S: Final = 45.0


class Answer(StrEnum):
    """What is known of a batch after all its tries. Of `unknown` nobody was told whether it is in."""

    OK = "ok"
    UNKNOWN = "unknown"
    FAIL = "fail"


_ANSWERS: Final = {
    "accepted": Answer.OK,
    "duplicate": Answer.OK,
    "unknown": Answer.UNKNOWN,
    "asked": Answer.FAIL,  # noted before the try; see Sent.answer
    "full": Answer.FAIL,
    "rejected": Answer.FAIL,
}
_STRONGER: Final = (Answer.FAIL, Answer.UNKNOWN, Answer.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One thing that must not be: which invariant of ARCHITECTURE §2, what happened, and the operations
    around it."""

    invariant: int
    what: str
    trace: tuple[Operation, ...] = ()


@dataclass(slots=True)
class Sent:
    """A batch that a producer tried to send, lines `first` to `first + lines - 1` of its workload."""

    batch_id: str
    workload: str
    first: int
    lines: int
    poison: str
    poison_line: int | None
    answered: Answer = Answer.FAIL
    operations: list[Operation] = field(default_factory=list)

    @property
    def answer(self) -> Answer:
        """Unknown while the last try has no answer: its producer died, or the run ended."""
        open_try = bool(self.operations) and self.operations[-1]["answer"] == "asked"
        return max(self.answered, Answer.UNKNOWN if open_try else Answer.FAIL, key=_STRONGER.index)

    def may_die(self, number: int) -> bool:
        """Whether this line may end as a dead letter."""
        return self.poison == "corrupt" or (bool(self.poison) and number == self.poison_line)

    def add(self, item: Operation) -> None:
        """One more try. Raises ValueError when it is another batch under the same id."""
        if (item["workload"], item["first"], item["lines"]) != (self.workload, self.first, self.lines):
            raise ValueError(
                f"the history sends other lines under the id {self.batch_id!r}; give every batch its own"
            )
        self.answered = max(self.answered, _ANSWERS[item["answer"]], key=_STRONGER.index)
        if item.get("poison"):  # poured in after the batch was accepted
            self.poison, self.poison_line = item["poison"], item.get("poison_line")
        self.operations.append(item)


@dataclass(slots=True)
class Told:
    """A whole history, read once."""

    begin: Operation = field(default_factory=dict)
    batches: dict[str, Sent] = field(default_factory=dict)
    files: dict[str, list[Operation]] = field(default_factory=dict)  # by workload, in order
    faults: list[Operation] = field(
        default_factory=list
    )  # faults, those that could not be made, and healings, in order
    deaths: list[Operation] = field(default_factory=list)  # of producers
    flows: list[Operation] = field(default_factory=list)
    samples: list[Operation] = field(default_factory=list)
    settled: bool = False
    end_s: float = 0.0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError for what is no history of a run."""
        told = cls()
        for item in History.read(path):
            told.end_s = max(told.end_s, float(item["t"]))
            match item["op"]:
                case "begin":
                    told.begin = item
                case "send":
                    told._send(item)
                case "file":
                    told.files.setdefault(item["workload"], []).append(item)
                case "fault" | "healed" | "missed":
                    told.faults.append(item)
                case "died":
                    told.deaths.append(item)
                case "flow":
                    told.flows.append(item)
                case "sample":
                    told.samples.append(item)
                case "settled":
                    told.settled = True
        if not told.begin:
            raise ValueError(f"{path} does not begin a run; give the history.jsonl of a chaos run")
        both = told.files.keys() & {sent.workload for sent in told.batches.values()}
        if both:
            raise ValueError(
                f"the workload {min(both)} is pushed and followed; its lines cannot be told apart"
            )
        return told

    def _send(self, item: Operation) -> None:
        sent = self.batches.get(item["id"])
        if sent is None:
            sent = self.batches[item["id"]] = Sent(
                item["id"],
                item["workload"],
                item["first"],
                item["lines"],
                item.get("poison", ""),
                item.get("poison_line"),
            )
        sent.add(item)

    def real_faults(self) -> list[Operation]:
        """Faults without their healings."""
        return [item for item in self.faults if item["op"] == "fault"]

    def written(self) -> dict[str, int]:
        """Lines that were written to the followed file of each workload."""
        return {workload: max(item["written"] for item in items) for workload, items in self.files.items()}

    # ---- traces ----------------------------------------------------------------------------------

    def trace(self, items: Iterable[Operation]) -> tuple[Operation, ...]:
        """These operations and the faults near them, in order; the middle is left out of what is too long."""
        own = sorted(items, key=lambda item: item["t"])
        near: list[Operation] = []
        if own:
            first, last = own[0]["t"] - BEFORE_S, own[-1]["t"] + AFTER_S
            near = [item for item in self.faults if first <= item["t"] <= last]
        return _cut(_cut(own, TRACE_MOST // 2) + _cut(near, TRACE_MOST // 2))

    def trace_of_line(self, workload: str, number: int) -> tuple[Operation, ...]:
        """Around the moment when a line of a followed file was written."""
        items = self.files.get(workload, [])
        after = next((i for i, item in enumerate(items) if item["written"] >= number), len(items) - 1)
        return self.trace(items[max(0, after - 1) : after + 1])


def _cut(items: Sequence[Operation], most: int = TRACE_MOST) -> tuple[Operation, ...]:
    kept = items if len(items) <= most else [*items[: most // 2], *items[-(most // 2) :]]
    return tuple(sorted(kept, key=lambda item: item["t"]))


def spans(numbers: Iterable[int], most: int = 8) -> str:
    """Numbers for people: 3-5, 9."""
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    words = [f"{a}" if a == b else f"{a}-{b}" for a, b in found[:most]]
    return ", ".join(words) + (f" and {len(found) - most} more" if len(found) > most else "")


def named(numbers: Sequence[int]) -> str:
    """Lines for people: line 3, lines 4-7."""
    return f"line{'' if len(numbers) == 1 else 's'} {spans(numbers)}"
