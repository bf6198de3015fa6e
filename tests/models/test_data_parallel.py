"""A fit by several processes is the fit by one, and a fit that was cut short goes on as if it had not been.

The processes are threads here that take turns (real ones: tests/gpu/test_jobs.py). The global generator of
torch is one per process, so each thread carries its own state of it from turn to turn.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from pipeline.models import bundle as bundles
from pipeline.models.config import ModelConfig
from pipeline.models.fits.state import FitSharing, FitState
from pipeline.models.fits.world import World, put_gradients
from pipeline.models.fitting import Fitted, TrainConfig, fit_network
from pipeline.models.threshold import Mode
from pipeline.models.trainer import FitProgress, FitRequest, fit
from pipeline.records.verdict import pattern_ids

CAUSAL = TrainConfig(model=ModelConfig(hidden=32, feed_forward=64), min_steps=30, max_steps=30)
TOLERANCE = 1e-3  # of the loss, as docs/detection.md says


class Turns:
    """Threads that run one at a time, and meet."""

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size)
        self.boxes: list[list[Any]] = [[None] * size, [None] * size]


class ThreadWorld(World):
    def __init__(self, rank: int, size: int, turns: Turns) -> None:
        self.rank, self.size, self.turns = rank, size, turns
        self.met = 0

    def meet(self, value: Any) -> list[Any]:
        """The values of all."""
        box, self.met = self.turns.boxes[self.met % 2], self.met + 1
        random = torch.get_rng_state()
        box[self.rank] = value
        self.turns.turn.release()
        self.turns.barrier.wait(60)
        self.turns.turn.acquire()
        torch.set_rng_state(random)
        return list(box)

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        mine = list(tensors)
        with torch.no_grad():
            for tensor, first in zip(mine, self.meet([t.detach().clone() for t in mine])[0], strict=True):
                tensor.copy_(first)

    def add_up(self, parameters: Sequence[torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([*(part.reshape(-1) for part in parts), value.detach().reshape(1)])
        total = torch.stack(self.meet(flat)).sum(0)
        put_gradients(parameters, total[:-1])
        return total[-1]

    def agree(self, number: int) -> int:
        return int(self.meet(number)[0])


def together(size: int, work: Callable[[World], Any]) -> list[Any]:
    """The work of so many ranks, each with its result."""
    turns = Turns(size)

    def one(rank: int) -> Any:
        with turns.turn:
            return work(ThreadWorld(rank, size, turns))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def lines(count: int = 24) -> pl.DataFrame:
    texts = [
        f"unit {chr(97 + n % 7)} {'did' if n % 2 else 'saw'} step{chr(97 + n)} of <NUM>" for n in range(count)
    ]
    return pl.DataFrame(
        {
            "masked": texts,
            "pattern_id": pl.Series(pattern_ids(texts), dtype=pl.UInt64),
            "count": pl.Series(range(5, 5 + count), dtype=pl.UInt64),
            "severe": [False] * count,
            "template_id": list(range(1, count + 1)),
        }
    )


def fitted_by(world: World | None, config: TrainConfig, budget_s: float | None = None) -> Fitted:
    fitted, sharing = Fitted(), FitSharing() if world is None else FitSharing(world=world)
    for _ in fit_network(
        lines(), fitted, tokens=("<NUM>",), config=config, seed=3, device="cpu", budget_s=budget_s,
        sharing=sharing,
    ):  # fmt: skip
        pass
    return fitted


@pytest.mark.parametrize(
    ("config", "size"),
    [(CAUSAL, 2), (replace(CAUSAL, batch=2), 3)],
    ids=["two", "more ranks than lines"],
)
def test_several_processes_fit_what_one_fits_from_the_same_batches(config: TrainConfig, size: int) -> None:
    alone = fitted_by(None, config)
    ranks = together(size, lambda world: fitted_by(world, config))
    for one in ranks:
        assert (one.steps, one.epochs) == (alone.steps, alone.epochs)
        assert one.loss == pytest.approx(alone.loss, abs=TOLERANCE)
    weights = [dict(one.network.named_parameters()) for one in ranks]
    for name, tensor in weights[0].items():
        assert all(torch.equal(tensor, other[name]) for other in weights[1:]), name


def test_all_processes_take_the_steps_that_the_first_one_affords() -> None:
    def work(world: World) -> int:
        return fitted_by(world, CAUSAL, budget_s=1e-6 if world.rank else 1000.0).steps

    assert together(2, work) == [30, 30]


def request(out: Path) -> FitRequest:
    return FitRequest(
        tokens=("<NUM>",), mask_version="m1", config=CAUSAL, seed=1, out=out, mode=Mode.BASELINE, version=out.name
    )  # fmt: skip


def cut_short(state: FitState, out: Path, stage: str) -> FitProgress:
    """A training that dies in the middle of a fit of this stage."""
    steps = fit(lines(), request(out), state=state)
    last = next(step for step in steps if step.stage == stage and step.epoch > 5)
    steps.close()
    return last


@pytest.mark.parametrize("stage", ["calibrate", "fit"])
def test_a_training_that_was_cut_short_goes_on_to_the_same_bundle(tmp_path: Path, stage: str) -> None:
    whole = list(fit(lines(), request(tmp_path / "v1")))
    died = cut_short(FitState(tmp_path / "state", every_s=0.0), tmp_path / "v2", stage)
    rest = list(fit(lines(), request(tmp_path / "v2"), state=FitState(tmp_path / "state", every_s=0.0)))
    assert len(rest) < len(whole)
    first = next(step for step in rest if step.stage != "prepare")
    assert (first.stage, first.percent) == (stage, pytest.approx(died.percent, abs=15))
    one, other = (bundles.load_manifest(tmp_path / name) for name in ("v1", "v2"))
    assert one.files == other.files
    assert one.calibration == other.calibration


def test_damaged_state_costs_the_time_and_not_the_training(tmp_path: Path) -> None:
    cut_short(FitState(tmp_path / "state", every_s=0.0), tmp_path / "v1", "fit")
    for file in (tmp_path / "state").iterdir():
        file.write_bytes(b"\x00damaged")
    list(fit(lines(), request(tmp_path / "v1"), state=FitState(tmp_path / "state")))
    assert bundles.load_manifest(tmp_path / "v1").version == "v1"


def test_ranks_above_the_first_write_neither_state_nor_a_bundle(tmp_path: Path) -> None:
    def work(world: World) -> int:
        state = FitState(tmp_path / f"state-{world.rank}", writes=world.rank == 0, every_s=0.0)
        return len(list(fit(lines(), request(tmp_path / f"v{world.rank}"), world=world, state=state)))

    first, second = together(2, work)
    assert first == second + 1, "rank 0 also writes"
    assert {path.name for path in tmp_path.iterdir()} == {"state-0", "state-1", "v0"}
    assert list((tmp_path / "state-1").iterdir()) == []
