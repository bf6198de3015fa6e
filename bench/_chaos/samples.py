"""What must hold in every sample of a run, and from each to the next (invariants 3 to 7).

Each thing that is wrong is told once, at the first sample that shows it, with how often it was seen.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bench._chaos.told import Operation, Told, Violation
from pipeline.settings import Settings
from pipeline.settings.values import is_sentinel

MIB: Final = 2**20
# An Arrow stream of one record has 2.5 KB, so that the halves of a split batch are larger than it was.
HALF_BYTES: Final = 4_096
# A sample needs a second; a machine that is short of processors some more. After that, nobody watched.
BLIND_S: Final = 60.0
JSON_TYPE: Final = "application/json"
# This kind of fault puts messages into the queues that are none.
GARBAGE: Final = "garbage"
GARBAGE_NOTED_S: Final = 5.0  # it is noted when it is done
GARBAGE_LEFT_S: Final = 90.0  # it lies in front; a role whose workers are stopped or start takes longest

Wrong = tuple[int, str, str]  # invariant, what to tell it once by, sentence


@dataclass(slots=True)
class _Seen:
    """A thing that is wrong, as the first sample showed it."""

    invariant: int
    what: str
    trace: tuple[Operation, ...]
    times: int = 1


@dataclass(slots=True)
class Watch:
    """Goes through the samples in order."""

    told: Told
    settings: Settings
    rss_mib: float
    wrong: dict[str, _Seen] = field(default_factory=dict)

    @property
    def fails_over(self) -> bool:
        return is_sentinel(self.settings.redis.url or "")

    def violations(self) -> list[Violation]:
        """Everything that is wrong, in the order it was first seen."""
        before: Operation | None = None
        samples = self.told.samples
        for sample in samples:
            self._note(sample, None, _processes(sample, self.rss_mib))
            if sample.get("away"):
                continue
            self._note(sample, before, self._alone(sample))
            if before is not None:
                self._note(sample, before, self._since(before, sample))
            before = sample
        for sample in samples[-1:]:
            self._note(sample, before, _left(sample))
        found = [
            Violation(
                invariant=seen.invariant,
                what=seen.what + (f" (in {seen.times} samples)" if seen.times > 1 else ""),
                trace=seen.trace,
            )
            for seen in self.wrong.values()
        ]
        return [*found, *self._blind()]

    def _note(self, sample: Operation, before: Operation | None, wrong: Iterator[Wrong]) -> None:
        for invariant, name, what in wrong:
            if name in self.wrong:
                self.wrong[name].times += 1
                continue
            shown = [_part(item, name) for item in (before, sample) if item is not None]
            self.wrong[name] = _Seen(invariant, f"at {sample['t']:.1f} s {what}", self.told.trace(shown))

    def _alone(self, sample: Operation) -> Iterator[Wrong]:
        """What one sample shows by itself."""
        yield from _sums(sample)
        yield from self._limits(sample)
        for name, model in sample["models"].items():
            if model["fault"]:
                yield 4, f"models {name} fault", f"the live model {name} cannot be served: {model['fault']}"
        if len(sample["running"]) > 1:
            yield 3, "running", f"{len(sample['running'])} trainings run at the same time"
        known = any(
            item.get("kind") == GARBAGE
            and item["t"] - GARBAGE_NOTED_S <= sample["t"] <= item["t"] + GARBAGE_LEFT_S
            for item in self.told.faults
        )
        for kind, count in sample["messages"].items():
            if kind != JSON_TYPE and not known:
                yield 7, f"messages {kind}", f"{count} messages of a queue are {kind}, not {JSON_TYPE}"

    def _since(self, before: Operation, sample: Operation) -> Iterator[Wrong]:
        """Steps back of counters and tokens, and pointers that went away (invariants 3, 4 and 6).

        A master that takes over may lack the last writes, which did not wait for it: counters, cursors and
        tokens go back together there. Pointers of models have waited."""
        for name, model in before["models"].items():
            yield from _pointer(name, model, sample["models"].get(name, {}))
        if not (self.fails_over and before.get("server") != sample.get("server")):
            yield from _grows(before, sample)

    def _limits(self, sample: Operation) -> Iterator[Wrong]:
        due, s = sample["due"], self.settings
        most_bytes = s.intake.max_pending_mib * MIB
        if due["roots"] > s.internal.max_pending_batches:
            yield 5, "due batches", f"{due['roots']} batches wait, {s.internal.max_pending_batches} may"
        # One batch larger than the limit gets in while nothing else waits (ledger/accept.lua).
        if due["root_bytes"] > most_bytes and due["roots"] > 1:
            yield (
                5,
                "due bytes",
                f"{due['root_bytes']:,} bytes of {due['roots']} batches wait, {most_bytes:,} may",
            )
        if due["roots"] > 1 and due["bytes"] > most_bytes + HALF_BYTES * due["halves"]:
            yield (
                5,
                "due halves",
                f"{due['bytes']:,} bytes wait with {due['halves']} halves, {most_bytes:,} may",
            )
        # What waits when the limit is reached may still die.
        dead_most = s.intake.max_dead_mib * MIB + most_bytes
        if sample["dead"]["bytes"] > dead_most:
            yield (
                5,
                "dead",
                f"the dead letters hold {sample['dead']['bytes']:,} bytes, {dead_most:,} may be kept",
            )
        used, most = sample["memory"]
        if 0 < most < used:
            yield 5, "memory", f"Redis uses {used:,} bytes, its limit is {most:,}"

    def _blind(self) -> Iterator[Violation]:
        times = [*(item["t"] for item in self.told.samples), self.told.end_s]
        if len(times) == 1:
            yield Violation(invariant=6, what="nobody watched: the history has no sample")
            return
        gap, at = max((b - a, a) for a, b in itertools.pairwise(times))
        if gap > BLIND_S:
            yield Violation(
                invariant=6, what=f"nobody watched for {gap:.0f} s from {at:.1f} s on: no sample was taken"
            )


def _sums(sample: Operation) -> Iterator[Wrong]:
    """The counters against each other and against the batches themselves (invariant 6)."""
    for workload, n in sample["workloads"].items():
        ended = {name: n[name] for name in ("stored", "in_flight", "dead", "discarded", "skipped")}
        if n["accepted"] != sum(ended.values()):
            shown = " + ".join(f"{value} {name.replace('_', ' ')}" for name, value in ended.items())
            yield 6, f"workloads {workload}", f"{workload} has {n['accepted']} lines accepted, but {shown}"
        if n["dead"] != n["letters"]:
            yield (
                *(6, f"workloads {workload} dead"),
                f"{workload} counts {n['dead']} dead lines, but its dead letters hold {n['letters']}",
            )
    due, counts = sample["due"], sample["counts"]
    for name, real, where in (
        ("batches", due["batches"], "in flight"),
        ("bytes", due["bytes"], "in flight"),
        ("dead_bytes", sample["dead"]["bytes"], "of dead letters"),
    ):
        if counts.get(name, 0) != real:
            what = f"{counts.get(name, 0):,} {name} are counted {where}, {real:,} are there"
            yield 6, f"counts {name}", what
    for name in sorted({n for n in counts if n.startswith("stage:")} | {f"stage:{s}" for s in due["stages"]}):
        real = due["stages"].get(name.removeprefix("stage:"), 0)
        if counts.get(name, 0) != real:
            yield (
                6,
                f"counts {name}",
                f"{counts.get(name, 0)} batches are counted in {name}, {real} are there",
            )


def _grows(before: Operation, sample: Operation) -> Iterator[Wrong]:
    """Steps back of what may only grow (invariants 3 and 6)."""
    for kind in ("tokens", "gpu_tokens"):
        for name, token in before[kind].items():
            if sample[kind].get(name, 0) < token:
                yield (
                    3,
                    f"{kind} {name}",
                    f"the newest token of {name} went from {token} back to {sample[kind].get(name, 0)}",
                )
    for name, lease in before["leases"].items():
        now = sample["leases"].get(name, {"holder": "", "token": 0})
        # `logweir up` on a private Redis forgets the leases of its dead workers; the tokens stay.
        if now["holder"] and now["token"] < lease["token"]:
            yield (
                3,
                f"leases {name}",
                f"the lease on {name} went from token {lease['token']} back to {now['token']}",
            )
        if now["holder"] and lease["holder"] not in ("", now["holder"]) and now["token"] == lease["token"]:
            yield (
                3,
                f"leases {name} twice",
                f"token {now['token']} of {name} is {lease['holder']}'s and {now['holder']}'s",
            )
    for workload, n in before["workloads"].items():
        now = sample["workloads"].get(workload, {})
        for counter in ("accepted", "stored", "skipped", "discarded"):
            if now.get(counter, 0) < n[counter]:
                what = f"{counter} lines of {workload} went from {n[counter]} back to {now.get(counter, 0)}"
                yield 6, f"workloads {workload} {counter}", what


def _pointer(name: str, model: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Wrong]:
    if not model["version"]:
        return
    if not now.get("version"):
        yield (
            4,
            f"models {name} gone",
            f"the pointer of the live model {name} was at {model['version']} and is empty now",
        )
        return
    moved = now["version"] != model["version"]
    if now["generation"] < model["generation"] or (moved and now["generation"] == model["generation"]):
        yield (
            *(4, f"models {name} generation"),
            f"the generation of model {name} went from {model['generation']} to {now['generation']} "
            f"while {model['version']} became {now['version']}",
        )
    if now["token"] < model["token"]:
        yield (
            3,
            f"models {name} token",
            f"model {name} was published under token {model['token']} and then {now['token']}",
        )


def _left(sample: Operation) -> Iterator[Wrong]:
    """What the last sample must not show, whatever was done to the queues before."""
    for kind, count in sample.get("messages", {}).items():
        if kind != JSON_TYPE:
            yield (
                7,
                f"messages {kind} left",
                f"{count} messages that are {kind} are left in the queues at the end",
            )


def _processes(sample: Operation, most_mib: float) -> Iterator[Wrong]:
    for pid, label, mib in sample.get("rss", ()):
        if mib > most_mib:
            yield 5, f"rss {label}", f"process {pid} ({label}) takes {mib:,.0f} MiB, {most_mib:,.0f} may be"


def _part(sample: Operation, name: str) -> Operation:
    """The part of a sample that one sentence is about."""
    kept: dict[str, Any] = {"t": sample["t"], "op": "sample"}
    words = name.split(" ")
    part = sample.get(words[0])
    if words[0] in ("due", "counts"):
        kept |= {word: sample.get(word) for word in ("due", "counts")}
    elif isinstance(part, Mapping) and len(words) > 1:
        kept[words[0]] = {words[1]: part.get(words[1])}
    elif part is not None:
        kept[words[0]] = part
    return kept
