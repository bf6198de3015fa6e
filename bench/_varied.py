"""Real log files cycled with varied parameters: each cycle says the same with other ids, as a system that
goes on does."""

import gzip
import random
import re
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import polars as pl

from bench._log_files import read_file
from pipeline.sources import formats

# Ids, sizes, addresses in memory, parts of UUIDs. Shorter numbers stay: the parts of an IP address or a date
# have bounds.
_PARAMETER: Final = re.compile(r"[0-9a-f]{4,}")
# Ids of traces and segments in the headers of SkyWalking. A system that goes on has other ones.
_TRACE: Final = re.compile(r"[0-9a-f]{32}(?:\.[0-9]+){2}")
_DIGIT: Final = re.compile("[0-9]")
_DIGITS: Final = "123456789"  # zeros stay, so that no number begins with one
_LETTERS: Final = "abcdef"


def real_files(data: Path, folder: Path) -> dict[str, Path]:
    """The unpacked log of every set by its name, one file each."""
    found = {p.parent.name: p for p in sorted((data / "loghub_2k").glob("*/*_2k.log"))}
    packed = {
        "HDFS-20k": gzip.decompress((data / "hdfs" / "HDFS_20000.log.gz").read_bytes()),
        "BGL-100k": gzip.decompress((data / "bgl" / "BGL_100k.log.gz").read_bytes()),
    }
    with zipfile.ZipFile(data / "trainticket" / "normal" / "F02normal01.zip") as archive:
        packed["TrainTicket"] = archive.read(next(n for n in archive.namelist() if n.endswith(".log")))
    for name, text in packed.items():
        found[name] = folder / f"{name}.log"
        found[name].write_bytes(text)
    return found


def varied(path: Path, cycle: int) -> Iterator[str]:
    """The lines of a file with other parameters in their messages; headers keep all but the ids of traces.
    `cycle` 0: as they were.

    Each cycle writes every digit, and every hexadecimal letter beside one, as another one.
    """
    rng = random.Random(cycle)
    other = [
        letters if cycle == 0 else "".join(rng.sample(letters, len(letters)))
        for letters in (_DIGITS, _LETTERS)
    ]
    table = str.maketrans(_DIGITS + _LETTERS, "".join(other))
    arrived = datetime.now(UTC)
    for chunk in read_file(path):
        parsed = formats.parse(chunk.records, chunk.formats, arrived=arrived, zone="UTC")
        for raw, message in pl.DataFrame({"raw": chunk.records["raw"], "m": parsed["message"]}).iter_rows():
            head = raw.removesuffix(message) if message else raw
            said = raw[len(head) :]
            head = _TRACE.sub(lambda found: _written(found.group(), table), head)
            yield head + _PARAMETER.sub(lambda found: _written(found.group(), table), said)


def _written(word: str, table: dict[int, int]) -> str:
    return word.translate(table) if _DIGIT.search(word) else word


def write_cycles(sources: dict[str, Path], folder: Path, lines: int, *, first: int = 1) -> list[Path]:
    """One file per set, `lines` physical lines in all, as many from each set as its share; whole records.
    `first`: number of the first cycle."""
    per_cycle = {name: path.read_bytes().count(b"\n") for name, path in sources.items()}
    made: list[Path] = []
    left = lines
    for number, (name, path) in enumerate(sorted(sources.items())):
        others = len(sources) - number - 1
        share = left if not others else lines * per_cycle[name] // sum(per_cycle.values())
        made.append(folder / f"{name}.log")
        _write(path, made[-1], share, first)
        left -= share
    return made


def _write(path: Path, to: Path, lines: int, cycle: int) -> None:
    with to.open("w", encoding="utf-8", newline="") as out:
        while lines > 0:
            for record in varied(path, cycle):
                out.write(record + "\n")
                lines -= record.count("\n") + 1
                if lines <= 0:
                    break
            cycle += 1
