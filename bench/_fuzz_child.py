"""One process of the fuzzer: `python -m bench._fuzz_child TARGET SECONDS SEED DIRECTORY`.

It writes what it is about to try and what it has counted into a mapped file, so that both are there when it
dies; the next process halves the inputs that it died of, until one is left. An execution is one input that
was tried to its end, or died of. Coverage-guided where atheris is installed (`pip install -e .[fuzz]`) and
the target takes one input at a time, else mutations of the seeds."""

import hashlib
import json
import mmap
import resource
import struct
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from bench._fuzz_mutations import MAX_BYTES, mutations

ROOM = 1 << 20  # bytes of the inputs that are tried together
HEAD = struct.Struct("<QQ")  # executions, inputs that are being tried
SIZE = struct.Struct("<I")  # in front of each of them
SECONDS = 1.0  # of processor time: a busy machine is no finding
FIRST_SECONDS = 10.0  # of the first inputs together, which also load what is used
KIB = 200 * 1024
REFUSED = "refused"
TRIED = "tried"  # the mapped file


def atheris_or_none() -> ModuleType | None:
    try:
        import atheris
    except ImportError:
        return None
    return atheris


def packed(inputs: Sequence[bytes]) -> bytes:
    return b"".join(SIZE.pack(len(data)) + data for data in inputs)


def unpacked(state: bytes) -> tuple[int, list[bytes]]:
    """Executions so far, and the inputs that were being tried."""
    executions, count = HEAD.unpack_from(state)
    inputs, at = [], HEAD.size
    for _ in range(count):
        (size,) = SIZE.unpack_from(state, at)
        inputs.append(state[at + SIZE.size : at + SIZE.size + size])
        at += SIZE.size + size
    return executions, inputs


def grouped(inputs: Iterable[bytes], together: int) -> Iterator[list[bytes]]:
    """So many inputs at a time, fewer when they are long."""
    group: list[bytes] = []
    room = ROOM
    for data in inputs:
        group.append(data)
        room -= SIZE.size + len(data)
        if len(group) == together or room < SIZE.size + MAX_BYTES:
            yield group
            group, room = [], ROOM


class Watch:
    """Tries inputs on one target; keeps each kind of finding once."""

    def __init__(self, name: str, directory: Path) -> None:
        from bench._fuzz_targets import TARGETS, attempt

        self.target, self.attempt, self.directory = TARGETS[name], attempt, directory
        self.usual = FIRST_SECONDS / self.target.together if self.target.together > 1 else 0.0
        path = directory / TRIED
        if not path.exists():
            path.write_bytes(bytes(HEAD.size + ROOM))
        self.executions, died_of = unpacked(path.read_bytes())
        with path.open("r+b") as file:
            self.state = mmap.mmap(file.fileno(), HEAD.size + ROOM)
        if len(died_of) == 1:
            self.executions += 1
        elif died_of:
            for half in halves(died_of):
                self.try_together(half)
            self.note("died of inputs together that alone do no harm", died_of)
        HEAD.pack_into(self.state, 0, self.executions, 0)

    def try_one(self, data: bytes) -> None:
        self.try_together([data[:MAX_BYTES]])

    def try_together(self, inputs: Sequence[bytes]) -> None:
        what, took = self._tried(inputs)
        if what:
            self._hunt(inputs, what, took)
        elif len(inputs) > 1:
            self.usual += (took / len(inputs) - self.usual) / 4
        self.executions += len(inputs)
        HEAD.pack_into(self.state, 0, self.executions, 0)

    def _tried(self, inputs: Sequence[bytes]) -> tuple[str, float]:
        """What was wrong, empty when nothing was, and seconds."""
        data = packed(inputs)
        self.state[HEAD.size : HEAD.size + len(data)] = data
        HEAD.pack_into(self.state, 0, self.executions, len(inputs))
        peak, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        raised = self.attempt(self.target, inputs)
        took = time.process_time() - began
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        if raised is not None:
            from pipeline.errors import LogweirError

            if isinstance(raised, LogweirError):
                return REFUSED, took
            last = traceback.extract_tb(raised.__traceback__)[-1]
            what = f"{type(raised).__name__} at {Path(last.filename).name}:{last.lineno}: {raised}"
            return what[:300], took
        if took > SECONDS + (len(inputs) * self.usual if len(inputs) > 1 else 0):
            return f"took {took:.1f} s", took
        return f"took {grown // 1024} MiB" if grown > KIB else "", took

    def _hunt(self, inputs: Sequence[bytes], what: str, took: float) -> None:
        """Halves the inputs until one is left that does it alone, or until neither half does it."""
        if len(inputs) > 1:
            tried = []
            for half in halves(inputs):
                forget_the_peak()
                tried.append((half, *self._tried(half)))
            guilty = [(half, found, seconds) for half, found, seconds in tried if found]
            for half, found, seconds in guilty:
                self._hunt(half, found, seconds)
            # Slow by being many is nothing to find; slower than their sum is.
            many = what.endswith(" s") and took <= SECONDS + 2 * sum(seconds for *_, seconds in tried)
            if guilty or many or what == REFUSED:
                return
        self.note(what, inputs)

    def note(self, what: str, inputs: Sequence[bytes]) -> None:
        kind = what.partition(":")[0] if "took" not in what else what.split(maxsplit=1)[0] + what[-2:]
        path = self.directory / f"finding-{hashlib.sha256(kind.encode()).hexdigest()[:12]}"
        if not path.with_suffix(".json").exists():
            keep(path, what, inputs)


def keep(path: Path, what: str, inputs: Sequence[bytes]) -> None:
    """An input as it is; several as in the state file, behind their number."""
    data = inputs[0] if len(inputs) == 1 else HEAD.pack(0, len(inputs)) + packed(inputs)
    path.write_bytes(data)
    path.with_suffix(".json").write_text(
        json.dumps({"what": what, "inputs": len(inputs), "bytes": len(data)})
    )


def halves(inputs: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]]:
    middle = len(inputs) // 2
    return inputs[:middle], inputs[middle:]


def forget_the_peak() -> None:
    """What was needed before is no reason to find that less grows; see proc(5)."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def main(argv: list[str]) -> int:
    name, seconds, seed, directory = argv[0], float(argv[1]), int(argv[2]), Path(argv[3])
    atheris: Any = atheris_or_none()
    if atheris is not None:
        with atheris.instrument_imports(include=["pipeline", "kombu", "json"]):
            watch = Watch(name, directory)
    else:
        watch = Watch(name, directory)
    target = watch.target
    if atheris is not None and target.together == 1:
        corpus = directory / "corpus"
        corpus.mkdir(exist_ok=True)
        for n, data in enumerate(target.seeds()):
            (corpus / f"seed-{n}").write_bytes(data)
        words = directory / "words.dict"
        escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in target.words if len(word) <= 64)
        words.write_text("".join(f'"{word}"\n' for word in escaped))
        options = [f"-max_total_time={int(seconds)}", f"-seed={seed}", f"-dict={words}", "-max_len=16384", "-rss_limit_mb=4096",
                   "-timeout=60", "-print_final_stats=0", "-verbosity=0", f"-artifact_prefix={directory}/"]  # fmt: skip
        atheris.Setup(["fuzz", *options, str(corpus)], watch.try_one)
        atheris.Fuzz()
        return 0
    deadline = time.monotonic() + seconds
    inputs_without_end = mutations(target.seeds(), target.words, seed, target.made)
    for inputs in grouped(inputs_without_end, target.together):
        watch.try_together(inputs)
        if time.monotonic() > deadline:
            break
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
