"""A fit by a gang as its trainer sees it: the order, the words of rank 0, and every end. Real ranks fit in
tests/gpu/test_jobs.py."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import polars as pl
import pytest
import redis
from pool_devices import put_devices

from pipeline.errors import DeviceFailed, LeaseRefused, RedisUnavailable, TrainingFailed
from pipeline.gpu.jobs import FIT, JobState, PoolJobs
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import LeaseMode
from pipeline.models.fitting import TrainConfig
from pipeline.models.threshold import Mode
from pipeline.models.trainer import FitProgress, FitRequest
from pipeline.settings import Settings
from pipeline.training import gang_fit
from pipeline.training.gang_fit import GangFit, RankWord, pack_order, read_order, said_by_rank

SAMPLE = pl.DataFrame({"masked": ["a", "b"], "count": [1, 2]})
HALF = FitProgress(stage="fit", percent=50.0, elapsed_s=1.0, remaining_s=1.0, epoch=2.0, loss=3.5, lines=2)


def request(out: Path, **more: object) -> FitRequest:
    known = FitRequest(
        tokens=("<IP>",), mask_version="m1", config=TrainConfig(), seed=1, out=out, mode=Mode.SELF, version="m000001-a",
        held_out=frozenset({2**64 - 1}), extra={"sequences": b"\x00\xff"}, query={"since": None, "words": ["x"]},
    )  # fmt: skip
    return replace(known, **more)  # type: ignore[arg-type]


@pytest.fixture
def gang(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GangFit]:
    monkeypatch.setattr(gang_fit, "POLL_S", 0.01)
    own = settings.replace(
        store_url=(tmp_path / "store").as_uri(), gpu_node_ttl_ms=200, gpu_beat_s=0.05, gpu_yield_s=30.0
    )
    with redis.Redis.from_url(str(settings.redis.url)) as client:
        pool = Pool(client, own)
        for node in ("node-a", "node-b"):
            put_devices(pool, 1, node=node)
        yield GangFit(pool=pool, jobs=PoolJobs(client, own), nodes=lambda: {"node-a", "node-b"}, devices=2)


def test_a_rank_reads_the_order_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "v0").mkdir()
    (tmp_path / "v0" / "weights").write_bytes(b"w")
    (tmp_path / "order").mkdir()
    given = request(tmp_path / "out", warm=tmp_path / "v0", config=TrainConfig(encoder=tmp_path / "v0"))
    pack_order(SAMPLE, given, tmp_path / "order")
    sample, read = read_order(tmp_path / "order")
    assert sample.equals(SAMPLE)
    assert read == replace(given, warm=Path("warm"), config=TrainConfig(encoder=Path("encoder")))
    assert (tmp_path / "order" / "warm" / "weights").read_bytes() == b"w"
    assert (tmp_path / "order" / "encoder" / "weights").read_bytes() == b"w"


def test_only_words_of_rank_0_are_progress() -> None:
    line = msgspec.json.encode(RankWord(progress=HALF))
    assert said_by_rank(line) == RankWord(progress=HALF)
    for other in (b"", b"logweir: x has GPU-1", b"{not json", b'{"progress": 7}'):
        assert said_by_rank(other) is None


def away(*_: object) -> None:
    raise RedisUnavailable("a test")


def test_the_trainer_shows_what_rank_0_says(
    gang: GangFit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = gang.fit(SAMPLE, request(tmp_path / "out"))
    assert next(steps).stage == "prepare"
    job = gang.jobs.known("train-m000001-a")
    assert (job.program, job.gang, job.need.devices, job.need.mode) == (FIT, True, 2, LeaseMode.EXCLUSIVE)
    word = msgspec.json.encode(RankWord(progress=HALF))
    gang.jobs.write(job.job_id, b"noise\n" + word[:9])
    assert next(steps).stage == "prepare"
    gang.jobs.write(job.job_id, word[9:] + b"\n")
    assert next(steps) == next(steps) == HALF
    monkeypatch.setattr(gang.jobs, "find", away)
    assert next(steps) == HALF, "a Redis that is away for a moment costs nothing"
    monkeypatch.undo()
    steps.close()
    assert gang.jobs.known(job.job_id).cancel, "a trainer that ends takes its gang along"
    assert list((tmp_path / "store").rglob("*.tar")) == [], "and the lines that it sent"


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (JobState.FAILED, TrainingFailed, "rank 1 ended with 1; `logweir gpu logs train-m000001-a`"),
        (JobState.LOST, DeviceFailed, "the training on 2 devices was lost: rank 1 ended with 1"),
        (JobState.SUCCEEDED, TrainingFailed, "rank 0 of train-m000001-a left no model"),
    ],
)
def test_the_end_of_a_gang_is_the_end_of_its_fit(
    gang: GangFit, tmp_path: Path, state: JobState, error: type[Exception], words: str
) -> None:
    steps = gang.fit(SAMPLE, request(tmp_path / "out"))
    next(steps)
    gang.jobs.change("train-m000001-a", lambda job: replace(job, state=state, why="rank 1 ended with 1"))
    with pytest.raises(error, match=words):
        list(steps)


def test_a_fault_that_rank_0_names_ends_all_tries(gang: GangFit, tmp_path: Path) -> None:
    steps = gang.fit(SAMPLE, request(tmp_path / "out"))
    next(steps)
    gang.jobs.write("train-m000001-a", b'{"failed":"2 distinct lines"}\n')
    with pytest.raises(TrainingFailed, match="2 distinct lines"):
        list(steps)
    assert gang.jobs.known("train-m000001-a").cancel


def test_a_gang_that_is_not_to_be_had_is_refused_with_the_reason(
    gang: GangFit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LeaseRefused, match="no node takes jobs"):
        list(replace(gang, nodes=list).fit(SAMPLE, request(tmp_path / "out")))
    with pytest.raises(LeaseRefused, match="no training on 3 devices: "):
        list(replace(gang, devices=3).fit(SAMPLE, request(tmp_path / "out")))
    monkeypatch.setattr(gang_fit, "PATIENCE_S", 0.3 - gang.pool.settings.gpu.yield_s)
    steps = gang.fit(SAMPLE, request(tmp_path / "out"))
    next(steps)
    gang.jobs.change("train-m000001-a", lambda job: replace(job, why="others have them"))
    with pytest.raises(LeaseRefused, match="others have them"):
        list(steps)


def test_the_gang_of_a_trainer_that_died_is_cancelled(gang: GangFit, tmp_path: Path) -> None:
    dead = gang.fit(SAMPLE, request(tmp_path / "out"))
    next(dead)
    steps = replace(gang).fit(SAMPLE, request(tmp_path / "out", version="m000002-b"))
    next(steps)
    assert gang.jobs.known("train-m000001-a").cancel and not gang.jobs.known("train-m000002-b").cancel
    steps.close()
    dead.close()
