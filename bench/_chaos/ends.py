"""Where a run has ended: counters, cursors, trainings, models and files (invariants 2, 3, 4, 6 and 7)."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import redis

from bench._chaos.there import Letter, Stored
from bench._chaos.told import Answer, Told, Violation
from pipeline.errors import BadBundle, BadPayload, StoreUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.models.registry import Registry
from pipeline.redis.connection import text_map
from pipeline.redis.keys import Keys
from pipeline.sources.chunks import Cursor

# Protocols 2 to 5 begin with these and end with a full stop; torch's own files are archives that hold such a
# part.
PICKLES: Final = tuple(bytes((0x80, protocol)) for protocol in (2, 3, 4, 5))
PICKLE_END: Final = b"."
ARCHIVED: Final = b"/data.pkl"
ARCHIVE: Final = b"PK\x03\x04"
HASHES: Final = ("verdicts:*", "templates", "cursors", "workers", "serving")
VALUES_LOOKED_AT: Final = 1_000  # of each such hash


# ---- counters and cursors ------------------------------------------------------------------------


def sums(told: Told, have: Stored, waiting: list[Letter], ledger: Ledger) -> Iterator[Violation]:
    """The counters of Redis against what the files, the dead letters and the history say (invariant 6)."""
    dead: dict[str, int] = {}
    flying: dict[str, int] = {}
    for letter in waiting:
        if not letter.rescore:
            of = dead if letter.state == "dead" else flying
            for workload, lines in letter.shares.items():
                of[workload] = of.get(workload, 0) + lines
    least, most = _accepted(told)
    totals = ledger.backlog.totals()
    for workload in sorted(totals.keys() | have.physical.keys() | most.keys()):
        t = totals.get(workload, {})
        n = {name: t.get(name, 0) for name in ("accepted", "stored", "dead", "discarded", "skipped")}
        ended = n["stored"] + n["dead"] + n["discarded"] + n["skipped"] + flying.get(workload, 0)
        wrong = []
        if n["accepted"] != ended:
            wrong.append(
                f"{n['accepted']} lines are counted as accepted and {ended} as stored or otherwise ended"
            )
        if n["stored"] != have.physical.get(workload, 0):
            wrong.append(
                f"{n['stored']} are counted as stored and the files hold {have.physical.get(workload, 0)}"
            )
        if n["dead"] != dead.get(workload, 0):
            wrong.append(f"{n['dead']} are counted as dead and the dead letters hold {dead.get(workload, 0)}")
        if not least.get(workload, 0) <= n["accepted"] <= most.get(workload, 0):
            told_of = f"{least.get(workload, 0)} to {most.get(workload, 0)}"
            wrong.append(f"{n['accepted']} are counted as accepted and the producers were told of {told_of}")
        for what in wrong:
            own = [item for s in told.batches.values() if s.workload == workload for item in s.operations]
            trace = told.trace([*own, *told.files.get(workload, [])][-5:])
            yield Violation(invariant=6, what=f"{workload}: {what}", trace=trace)


def _accepted(told: Told) -> tuple[dict[str, int], dict[str, int]]:
    """Lines that must have been accepted of each workload, and those that may have been."""
    least, most = told.written(), told.written()
    for sent in told.batches.values():
        if sent.answer is not Answer.FAIL:
            most[sent.workload] = most.get(sent.workload, 0) + sent.lines
        if sent.answer is Answer.OK:
            least[sent.workload] = least.get(sent.workload, 0) + sent.lines
    return least, most


def cursors(told: Told, client: "redis.Redis", ledger: Ledger) -> Iterator[Violation]:
    """The cursor of every followed file stands at its end (invariant 2)."""
    places: dict[Path, Cursor] = {}
    for text in text_map(client.hgetall(ledger.keys.cursors)).values():
        if not text.startswith("{"):  # of a partition or a stream
            continue
        try:
            cursor = Cursor.unpack(text)
        except BadPayload as exc:
            yield Violation(invariant=2, what=str(exc))
            continue
        places[Path(cursor.path).absolute()] = cursor
    for workload, items in told.files.items():
        if "path" not in items[-1]:
            continue
        path = Path(items[-1]["path"]).absolute()
        size = path.stat().st_size if path.exists() else 0
        offset = places[path].places[-1].offset if path in places else 0  # of the newest file
        if offset != size:
            what = f"the cursor of {path} stands at byte {offset:,} of {size:,}"
            yield Violation(invariant=2, what=what, trace=told.trace_of_line(workload, items[-1]["written"]))


# ---- trainings and models ------------------------------------------------------------------------


def trainings(told: Told, client: "redis.Redis", keys: Keys) -> Iterator[Violation]:
    """Never two at the same time, and none under an older token than the one before (invariant 3)."""
    before: dict[str, Any] | None = None
    for now in _begun(client, keys):
        if before is not None and not before["ended_ms"]:
            yield _beside(told, before, now, "the first never ended")
        elif before is not None and now["started_ms"] < before["ended_ms"]:
            yield _beside(
                told, before, now, f"the first ended {before['ended_ms'] - now['started_ms']} ms later"
            )
        if before is not None and now["token"] < before["token"]:
            yield _beside(told, before, now, f"its token is {now['token']}, theirs was {before['token']}")
        before = now


def _beside(told: Told, before: dict[str, Any], now: dict[str, Any], why: str) -> Violation:
    what = f"training {now['id']} began beside {before['id']}: {why}"
    around = [
        {"t": item["t"], "op": "sample", "running": item["running"], "leases": item["leases"]}
        for item in told.samples
        if {before["id"], now["id"]} & set(item.get("running", ()))
    ]
    return Violation(invariant=3, what=what, trace=told.trace(around))


def _begun(client: "redis.Redis", keys: Keys) -> list[dict[str, Any]]:
    """Every training that is remembered and has begun: id, token, started_ms, ended_ms (0: it runs), in
    order."""
    found = []
    for training_id in text_list(client.zrange(keys.trainings, 0, -1)):
        entry = text_map(client.hgetall(keys.training(training_id)))
        if entry.get("started_ms"):
            numbers = {name: int(entry.get(name) or 0) for name in ("token", "started_ms", "ended_ms")}
            found.append({"id": training_id, **numbers})
    return sorted(found, key=lambda t: (t["started_ms"], t["token"]))


def models(told: Told, registry: Registry) -> Iterator[Violation]:
    """A model that was live once is live at the end, and its files are whole (invariant 4)."""
    seen = {name for item in told.samples for name, m in item.get("models", {}).items() if m["version"]}
    live = {one.model: one for one in registry.live()}
    for name in sorted(seen - live.keys()):
        yield Violation(invariant=4, what=f"the model {name} was live, and no version of it is at the end")
    for one in live.values():
        for version in filter(None, (one.version, one.previous)):
            try:
                registry.stored.verified(version)
            except (BadBundle, StoreUnavailable) as exc:
                word = "live" if version == one.version else "previous"
                yield Violation(
                    invariant=4, what=f"the {word} version of the model {one.model} is not whole: {exc}"
                )


# ---- nothing executable --------------------------------------------------------------------------


def pickles(folders: Iterable[Path], client: "redis.Redis", keys: Keys) -> Iterator[Violation]:
    """Neither a file nor a value in Redis is a pickle (invariant 7)."""
    for path in (path for folder in folders for path in folder.rglob("*")):
        # Parquet files were read as such.
        if path.is_file() and path.suffix not in (".parquet", ".log") and _is_pickle_file(path):
            yield Violation(invariant=7, what=f"{path} is a pickle")
    for key in client.scan_iter(match=keys("*"), count=1_000, _type="string"):
        ends = client.getrange(key, 0, 1), client.getrange(key, -1, -1)
        if _is_pickle(*map(as_bytes, ends)):
            yield Violation(invariant=7, what=f"the key {as_bytes(key).decode()} in Redis is a pickle")
    for pattern in HASHES:
        for key in client.scan_iter(match=keys(pattern), count=1_000, _type="hash"):
            for number, (name, value) in enumerate(client.hscan_iter(key, count=VALUES_LOOKED_AT)):
                if number >= VALUES_LOOKED_AT:
                    break
                if _is_pickle(value[:2], value[-1:]):
                    where = f"{as_bytes(key).decode()} {as_bytes(name).decode(errors='replace')}"
                    yield Violation(invariant=7, what=f"the value {where} in Redis is a pickle")


def _is_pickle(first: bytes, last: bytes) -> bool:
    return first in PICKLES and last == PICKLE_END


def _is_pickle_file(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(4)
            size = file.seek(0, 2)
            file.seek(max(0, size - 1))
            if _is_pickle(head[:2], file.read(1)):
                return True
            file.seek(0)
            return head == ARCHIVE and ARCHIVED in file.read()
    except OSError:
        return False  # a socket, or gone by now


def as_bytes(value: Any) -> bytes:
    """An answer with the type it has."""
    return bytes(value)


def text_list(values: Any) -> list[str]:
    """An answer of names as text."""
    return [bytes(value).decode() for value in values]
