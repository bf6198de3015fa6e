"""Lines that several processes bring at the same time: scored once, waited for briefly, and lost without
harm."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import redis
from cachetools import LRUCache
from polling import wait_until

from pipeline.errors import BadPayload
from pipeline.models import single_flight as module
from pipeline.models.evidence import Evidence
from pipeline.models.single_flight import SingleFlight, pack_evidence, unpack_evidence
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

LINES = {n: f"line {n}" for n in range(40)}


class Scorer:
    """What a process scores, and how often."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.passes = 0

    def __call__(self, lines: list[str]) -> Sequence[Evidence]:
        self.passes += 1
        self.lines += lines
        return [said(line) for line in lines]


def said(line: str) -> Evidence:
    return Evidence(surprisal=float(len(line)), words=(line,), unseen=("word",), tokens=2, severity="failed")


@pytest.fixture
def quick(settings: Settings) -> Settings:
    return settings.replace(claim_ttl_ms=1_500)  # waits half a second


def process(settings: Settings, owner: str) -> SingleFlight:
    return SingleFlight(connect(settings), settings, owner)


@pytest.fixture
def first(quick: Settings) -> SingleFlight:
    return process(quick, "first")


@pytest.fixture
def second(quick: Settings) -> SingleFlight:
    return process(quick, "second")


@pytest.fixture
def halves(settings: Settings) -> Iterator[list[str]]:
    keys = Keys(settings.redis.key_prefix)
    yield [keys.evidence("young"), keys.evidence("old")]


def whole(found: dict[int, Evidence]) -> bool:
    return found == {n: said(line) for n, line in LINES.items()}


def test_a_line_is_scored_by_the_first_process_that_brings_it(
    first: SingleFlight, second: SingleFlight
) -> None:
    scorer, other = Scorer(), Scorer()
    assert whole(first.evidence("m1", LINES, scorer))
    assert whole(second.evidence("m1", LINES, other))
    assert whole(first.evidence("m1", LINES, scorer))
    assert (scorer.passes, len(scorer.lines), other.passes) == (1, 40, 0)
    second.evidence("m2", LINES, other)
    assert other.passes == 1, "under another version it is another line"


def test_what_this_process_has_scored_it_knows_without_asking(
    first: SingleFlight, client: "redis.Redis", halves: list[str]
) -> None:
    scorer = Scorer()
    first.evidence("m1", LINES, scorer)
    client.delete(*halves)
    assert whole(first.evidence("m1", LINES, scorer))
    assert scorer.passes == 1
    assert not client.exists(*halves)


def test_two_at_the_same_time_score_their_own_part_and_wait_for_the_other(
    first: SingleFlight, second: SingleFlight
) -> None:
    began, found, theirs = threading.Event(), {}, Scorer()

    def slow(lines: list[str]) -> Sequence[Evidence]:
        began.set()
        time.sleep(0.2)
        return theirs(lines)

    half = {n: LINES[n] for n in range(20)}
    peer = threading.Thread(target=lambda: found.update(second.evidence("m1", half, slow)))
    peer.start()
    assert began.wait(10)
    mine = Scorer()
    assert whole(first.evidence("m1", LINES, mine))
    peer.join(10)
    assert found == {n: said(line) for n, line in half.items()}
    assert sorted(mine.lines) == sorted(LINES[n] for n in range(20, 40)), "not what the other had begun with"
    assert sorted(mine.lines + theirs.lines) == sorted(LINES.values())


def test_whoever_fails_at_a_line_keeps_nobody_waiting(first: SingleFlight, second: SingleFlight) -> None:
    def fails(lines: list[str]) -> Sequence[Evidence]:
        raise ValueError("it cannot be scored")

    with pytest.raises(ValueError, match="cannot be scored"):
        second.evidence("m1", LINES, fails)
    mine = Scorer()
    began = time.monotonic()
    assert whole(first.evidence("m1", LINES, mine))
    assert time.monotonic() - began < first.wait_s


PEER = """
import sys, time
from pipeline.models.single_flight import SingleFlight
from pipeline.redis.connection import connect
from pipeline.models.threshold import Evidence
from pipeline.settings import Settings

settings = Settings.load()
flight = SingleFlight(connect(settings), settings, sys.argv[1])
flight.wait_s = 20.0
scored = 0

def score(lines):
    global scored
    scored += len(lines)
    print("begun", flush=True)
    time.sleep(float(sys.argv[2]))
    return [Evidence(surprisal=float(len(line)), words=(line,), unseen=("word",), tokens=2, severity="failed") for line in lines]

print("ready", flush=True)
sys.stdin.readline()
for at in range(0, 400, 40):
    lines = {n: f"line {n}" for n in range(at, at + 80)}
    found = flight.evidence("m1", lines, score)
    assert list(sorted(found)) == sorted(lines) and all(found[n].words == (lines[n],) for n in lines)
print(scored, flush=True)
"""


def peer(settings: Settings, name: str, takes_s: float) -> "subprocess.Popen[str]":
    made = subprocess.Popen(
        [sys.executable, "-c", PEER, name, str(takes_s)],
        env={**os.environ, **settings.to_environ()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert made.stdout is not None
    assert made.stdout.readline() == "ready\n"
    return made


@pytest.mark.long
def test_two_processes_with_the_same_lines_score_each_once_together(quick: Settings) -> None:
    both = [peer(quick, name, 0.05) for name in ("a", "b")]
    for each in both:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    scored = [int(each.communicate(timeout=60)[0].split()[-1]) for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert sum(scored) == 440, scored


def test_a_peer_that_is_killed_costs_one_short_wait(first: SingleFlight, quick: Settings) -> None:
    dies = peer(quick, "dies", 60.0)
    assert dies.stdin is not None and dies.stdout is not None
    dies.stdin.write("go\n")
    dies.stdin.flush()
    assert dies.stdout.readline() == "begun\n"
    dies.send_signal(signal.SIGKILL)
    dies.communicate(timeout=20)
    mine = Scorer()
    began = time.monotonic()
    assert whole(first.evidence("m1", LINES, mine))
    assert first.wait_s <= time.monotonic() - began < first.wait_s + 5
    assert sorted(mine.lines) == sorted(LINES.values())
    began = time.monotonic()
    assert whole(process(quick, "third").evidence("m1", LINES, mine))
    assert time.monotonic() - began < first.wait_s, "nobody waits for it a second time"
    assert mine.passes == 1


def test_what_was_left_to_a_process_for_too_long_is_given_to_the_next(
    first: SingleFlight, second: SingleFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLAIM_MS", 500)  # shorter than a busy machine pauses, it would end too soon
    assert second._claim("m1", [1, 2]) == ({}, [1, 2], [])
    assert first._claim("m1", [1])[2] == [1]
    assert wait_until(lambda: first._claim("m1", [1, 2]) == ({}, [1, 2], []), timeout_s=10)
    assert second._claim("m1", [1, 2]) == ({}, [], [1, 2])


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_redis_that_forgets_costs_nothing_but_work(
    first: SingleFlight, second: SingleFlight, client: "redis.Redis", halves: list[str], when: str
) -> None:
    scorer = Scorer()

    def forgets(lines: list[str]) -> Sequence[Evidence]:
        client.delete(*halves)
        client.script_flush()
        return scorer(lines)

    assert whole(first.evidence("m1", LINES, forgets if when == "meanwhile" else scorer))
    if when == "before":
        client.delete(*halves)
    assert whole(second.evidence("m1", LINES, scorer))
    assert len(scorer.lines) == (40 if when == "meanwhile" else 80)


def test_without_redis_every_line_is_scored_here(settings: Settings) -> None:
    away = redis.Redis.from_url("redis://127.0.0.1:1/0", socket_connect_timeout=0.2)
    scorer = Scorer()
    assert whole(SingleFlight(away, settings, "alone").evidence("m1", LINES, scorer))
    assert scorer.passes == 1


@pytest.mark.parametrize(
    "blob", [b"\x00", b"\xc1", b"\x91\x09", b"\x98\x02" + b"\x00" * 7, b"\x98\x01" + b"\xc0" * 7, b"\x93abc"]
)
def test_evidence_that_cannot_be_read_is_worked_out_again(
    first: SingleFlight, client: "redis.Redis", halves: list[str], blob: bytes
) -> None:
    with pytest.raises(BadPayload):
        unpack_evidence(blob)
    client.hset(halves[0], mapping={module._field("m1", n): blob for n in LINES})
    scorer = Scorer()
    assert whole(first.evidence("m1", LINES, scorer))
    assert scorer.passes == 1
    assert all(
        unpack_evidence(kept) == said(LINES[n])
        for n in LINES
        for kept in [client.hget(halves[0], module._field("m1", n))]
    )  # type: ignore[arg-type]


def test_evidence_is_the_same_after_a_way_through_redis() -> None:
    for evidence in (
        said("x"),
        Evidence(surprisal=0.1 + 0.2, novelty=1 / 3, prior=-2.5),
        Evidence(surprisal=0.0),
    ):
        assert unpack_evidence(pack_evidence(evidence)) == evidence


def test_what_is_kept_is_bounded_in_number_size_and_time(
    first: SingleFlight, client: "redis.Redis", halves: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HALF_LIMIT", 50)
    first._near = LRUCache(30)
    scorer = Scorer()
    for at in range(0, 1_000, 70):
        first.evidence("m1", {n: f"line {n}" for n in range(at, at + 70)}, scorer)
        assert all(int(client.hlen(half)) < 50 + 70 for half in halves)
        assert len(first._near) == 30
    assert all(0 < int(client.ttl(half)) <= module.TTL_S for half in halves)
    first.evidence("m2", {n: f"line {n}" for n in range(3_000)}, scorer)
    assert all(int(client.hlen(half)) < 50 + 500 for half in halves)
    client.delete(*halves)

    def wordy(lines: list[str]) -> Sequence[Evidence]:
        return [Evidence(surprisal=1.0, words=("é" * 3_000,)) for _ in lines]

    first.evidence("m3", {1: "a"}, wordy)
    assert not client.exists(*halves), "too long to be kept, and nobody waits for it"


def test_longest_evidence_of_ordinary_words_is_kept() -> None:
    words = tuple(f"{n:02d}" + "w" * 62 for n in range(20))
    assert (
        len(pack_evidence(Evidence(surprisal=1.0, words=words[:5], unseen=words, severity="failed")))
        < module.BLOB_LIMIT
    )
