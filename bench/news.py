"""One-off sentences that tell of a cause at a calm level: how many are found, and what is found beside them.

Sixty sentences in five languages are put five at a time into the logs of the samples and three public ones,
whose first half is the baseline. `false_per_day`: findings a day over seven calm days in which two harmless
new sentences occur each, or calm findings over the public logs without any sentence, whichever is more.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl
import zstandard

from bench._running import scratch, watched_run
from bench._sentences import CAUSES, HARMLESS
from pipeline.report import findings
from pipeline.report.findings import Finding, finding_severity

SAMPLES: Final = Path(__file__).resolve().parents[1] / "samples"
PUBLIC: Final = ("OpenSSH", "HDFS", "Zookeeper")
AT_ONCE: Final = 5
DAYS: Final = 7
_DAY: Final = re.compile(r"(2026[-/]11[-/])20|20(?=[/ ]Nov[/ ]2026)")
_SEED: Final = 40
# The message of a calm line of each log.
_MESSAGES: Final = {
    name: re.compile(pattern)
    for name, pattern in {
        "nginx-access": r'\] "([^"]*)" 200 ',
        "nginx-error": r"\[(?:notice|info|warn)\] \d+#\d+: (.*)",
        "payments": r'level=info msg="([^"]*)"',
        "postgres": r" LOG:  (.*)",
        "redis": r"^\d+:[A-Z] \S+ \S+ \S+ \S+ [*#.-] (.*)",
        "shop": r" INFO shop\.\w+: (.*)",
        "worker": r'"level": "info", "event": "([^"]*)"',
        "OpenSSH": r" sshd\[\d+\]: (.*)",
        "HDFS": r" INFO \S+: (.*)",
        "Zookeeper": r" - INFO +\[.*?@\d+\] - (.*)",
    }.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    name: str
    baseline: Path
    observed: list[str]


def measure(data: Path) -> dict[str, Any]:
    sentences = [s for of_language in CAUSES.values() for s in of_language]
    random.Random(_SEED).shuffle(sentences)
    with scratch() as folder:
        logs = list(_logs(data, folder))
        missed: dict[str, str] = {}  # by the log that a sentence was put into
        for number, at in enumerate(range(0, len(sentences), AT_ONCE)):
            log = logs[number % len(logs)]
            missed |= dict.fromkeys(
                _missed(log, sentences[at : at + AT_ONCE], folder / f"n{number}"), log.name
            )
        calm = [_calm_day(day, folder / f"day{day}") for day in range(1, DAYS + 1)]
        public = {
            log.name: _calm(_found(log, log.observed, folder / log.name))
            for log in logs
            if log.name in PUBLIC
        }
    chosen = {s for of_language in CAUSES.values() for s in of_language[::2]}
    return {
        "sentences": len(sentences),
        "found": round(1 - len(missed) / len(sentences), 3),
        "found_of_chosen": round(1 - len(missed.keys() & chosen) / len(chosen), 3),
        "found_of_reported": round(1 - len(missed.keys() - chosen) / (len(sentences) - len(chosen)), 3),
        "false_per_day": max(sum(calm) / DAYS, *public.values()),
        "calm_days": calm,
        "public": public,
        "missed": missed,
    }


def _logs(data: Path, folder: Path) -> Iterator[_Log]:
    for path in sorted((SAMPLES / "observed").glob("*.zst")):
        name = path.name.partition(".")[0]
        yield _Log(name=name, baseline=SAMPLES / "baseline" / path.name, observed=_unpacked(path))
    for name in PUBLIC:
        lines = next((data / "loghub_2k" / name).glob("*.log")).read_text(encoding="utf-8").splitlines()
        half = folder / f"{name}-first.log"
        half.write_text("\n".join(lines[: len(lines) // 2]) + "\n", encoding="utf-8")
        yield _Log(name=name, baseline=half, observed=lines[len(lines) // 2 :])


def _unpacked(path: Path) -> list[str]:
    with zstandard.open(path, "rt", encoding="utf-8") as text:
        return [line.rstrip("\n") for line in text]


def _missed(log: _Log, sentences: Sequence[str], folder: Path) -> list[str]:
    said = list(log.observed)
    for at, line in zip(_places(log, len(sentences), folder), sentences, strict=True):
        said[at] = _saying(log, said[at], line)
    found = _found(log, said, folder)
    shown = "\n".join(s.raw for f in found for s in f.samples)
    return [s for s in sentences if s not in shown and json.dumps(s)[1:-1] not in shown]


def _places(log: _Log, number: int, folder: Path) -> list[int]:
    """Indices of calm lines, drawn over the whole log."""
    calm = [at for at, line in enumerate(log.observed) if _MESSAGES[log.name].search(line)]
    return random.Random(f"{_SEED} {folder.name}").sample(calm, number)


def _saying(log: _Log, line: str, sentence: str) -> str:
    """The line with this sentence in the place of its message."""
    found = _MESSAGES[log.name].search(line)
    assert found is not None
    start, end = found.span(1)
    said = json.dumps(sentence, ensure_ascii=False)[1:-1] if line.startswith("{") else sentence
    return line[:start] + said + line[end:]


def _found(log: _Log, lines: Sequence[str], folder: Path) -> list[Finding]:
    folder.mkdir(parents=True, exist_ok=True)
    observed = folder / f"{log.name}.log"
    observed.write_text("\n".join(lines) + "\n", encoding="utf-8")
    watched_run([str(observed), "--baseline", str(log.baseline)], folder / "out")
    templates = pl.read_parquet(folder / "out" / "templates.parquet")
    return findings.collect(folder / "out" / "results", templates)


def _calm(found: Sequence[Finding]) -> int:
    return sum(finding_severity(f) == 1 for f in found)


def _calm_day(day: int, folder: Path) -> int:
    """The findings of a day that says what the baselines of the samples say, with other numbers, and two
    sentences more."""
    folder.mkdir(parents=True)
    draw = random.Random(f"{_SEED} {day}")
    baselines = sorted((SAMPLES / "baseline").glob("*.zst"))
    files = []
    for path in baselines:
        log = _Log(name=path.name.partition(".")[0], baseline=path, observed=_unpacked(path))
        lines = list(log.observed)
        if log.name == "shop":
            for at, line in zip(_places(log, 2, folder), HARMLESS[2 * day - 2 : 2 * day], strict=True):
                lines[at] = _saying(log, lines[at], line)
        files.append(folder / f"{log.name}.log")
        moved = (_other_numbers(_on(line, day), draw) for line in lines)
        files[-1].write_text("\n".join(moved) + "\n", encoding="utf-8")
    watched_run([*map(str, files), "--baseline", *map(str, baselines)], folder / "out")
    templates = pl.read_parquet(folder / "out" / "templates.parquet")
    return len(findings.collect(folder / "out" / "results", templates))


def _on(line: str, day: int) -> str:
    """The line so many days after the 20th."""
    return _DAY.sub(lambda found: f"{found[1] or ''}{20 + day}", line)


def _other_numbers(line: str, draw: random.Random) -> str:
    """Numbers of four digits and more behind the head of a line, as another day has them."""
    head, tail = line[:48], line[48:]
    return head + re.sub(
        r"(?<![\w.:/-])[1-9]\d{3,5}(?![\w.:-])",
        lambda n: str(draw.randrange(10 ** (len(n.group()) - 1), 10 ** len(n.group()))),
        tail,
    )
