"""One process of the fuzzer: `python -m bench._fuzz_child TARGET SECONDS SEED DIRECTORY`.

It writes what it is about to try and what it has counted into a mapped file, so that both are there when it dies.
Coverage-guided where atheris is installed (`pip install -e .[fuzz]`), else mutations of the seeds.
"""

import hashlib
import json
import mmap
import resource
import struct
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

ROOM = 64 * 1024
HEAD = struct.Struct("<QQ")  # executions, bytes of the input that is being tried
SECONDS = 1.0  # of processor time: a busy machine is no finding
KIB = 200 * 1024


def atheris_or_none() -> ModuleType | None:
    try:
        import atheris
    except ImportError:
        return None
    return atheris


class Watch:
    """Tries inputs on one target; keeps each kind of finding once."""

    def __init__(self, name: str, directory: Path) -> None:
        from bench._fuzz_targets import TARGETS, attempt

        self.target, self.attempt, self.directory = TARGETS[name], attempt, directory
        path = directory / "state"
        if not path.exists():
            path.write_bytes(bytes(HEAD.size + ROOM))
        self.file = path.open("r+b")
        self.state = mmap.mmap(self.file.fileno(), HEAD.size + ROOM)
        self.executions = HEAD.unpack_from(self.state)[0]

    def try_one(self, data: bytes) -> None:
        data = data[:ROOM]
        self.executions += 1
        HEAD.pack_into(self.state, 0, self.executions, len(data))
        self.state[HEAD.size : HEAD.size + len(data)] = data
        peak, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        raised = self.attempt(self.target, data)
        took = time.process_time() - began
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        if raised is not None:
            last = traceback.extract_tb(raised.__traceback__)[-1]
            self.note(
                f"{type(raised).__name__} at {Path(last.filename).name}:{last.lineno}: {raised}"[:300], data
            )
        elif took > SECONDS:
            self.note(f"took {took:.1f} s", data)
        elif grown > KIB:
            self.note(f"took {grown // 1024} MiB", data)

    def note(self, what: str, data: bytes) -> None:
        kind = what.partition(":")[0] if "took" not in what else what.split(maxsplit=1)[0] + what[-2:]
        path = self.directory / f"finding-{hashlib.sha256(kind.encode()).hexdigest()[:12]}"
        if not path.with_suffix(".json").exists():
            path.write_bytes(data)
            path.with_suffix(".json").write_text(json.dumps({"what": what, "bytes": len(data)}))


def main(argv: list[str]) -> int:
    name, seconds, seed, directory = argv[0], float(argv[1]), int(argv[2]), Path(argv[3])
    atheris: Any = atheris_or_none()
    if atheris is not None:
        with atheris.instrument_imports(include=["pipeline", "kombu", "json"]):
            watch = Watch(name, directory)
        corpus = directory / "corpus"
        corpus.mkdir(exist_ok=True)
        for n, data in enumerate(watch.target.seeds()):
            (corpus / f"seed-{n}").write_bytes(data)
        words = directory / "words.dict"
        escaped = (
            "".join(f"\\x{byte:02x}" for byte in word) for word in watch.target.words if len(word) <= 64
        )
        words.write_text("".join(f'"{word}"\n' for word in escaped))
        options = [f"-max_total_time={int(seconds)}", f"-seed={seed}", f"-dict={words}", "-max_len=16384", "-rss_limit_mb=4096",
                   "-timeout=60", "-print_final_stats=0", "-verbosity=0", f"-artifact_prefix={directory}/"]  # fmt: skip
        atheris.Setup(["fuzz", *options, str(corpus)], watch.try_one)
        atheris.Fuzz()
        return 0
    from bench._fuzz_targets import mutations

    watch = Watch(name, directory)
    deadline = time.monotonic() + seconds
    for data in mutations(watch.target, seed):
        watch.try_one(data)
        if time.monotonic() > deadline:
            break
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
