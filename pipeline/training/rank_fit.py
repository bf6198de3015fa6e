"""`python -m pipeline.training.rank_fit`: one rank of a fit by a gang (gang_fit.py), in the directory of its
job.

It computes and writes files. Rank 0 prints its progress and leaves the bundle; the directory of the results
holds its state for the next try.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from pipeline.errors import LogweirError
from pipeline.logs import set_up
from pipeline.models import trainer
from pipeline.models.fits.state import FitState
from pipeline.models.fits.world import GangWorld, own_device
from pipeline.settings import inherited
from pipeline.training.gang_fit import BUNDLE, STATE, RankWord, read_order


def main() -> int:
    set_up("info")
    variables = inherited(
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GPU_JOB_RESULTS"
    )  # fmt: skip
    rank, results = int(variables["RANK"]), Path(variables["GPU_JOB_RESULTS"])
    try:
        sample, request = read_order(Path())
        device = own_device(int(variables["LOCAL_RANK"]))
        request = replace(request, out=results / BUNDLE, device=device)
        world = GangWorld(
            rank,
            int(variables["WORLD_SIZE"]),
            address=variables["MASTER_ADDR"],
            port=int(variables["MASTER_PORT"]),
            run=variables["TORCHELASTIC_RUN_ID"],
            device=device,
        )
        if rank == 0:  # of a try that died behind its last step
            shutil.rmtree(request.out, ignore_errors=True)
        state = FitState(results / STATE, writes=rank == 0)
        for progress in trainer.fit(sample, request, world=world, state=state):
            _say(rank, RankWord(progress=progress))
        world.leave()
        if rank == 0:
            shutil.rmtree(results / STATE)
    except LogweirError as exc:
        _say(rank, RankWord(failed=str(exc)))
        return 1
    return 0


def _say(rank: int, word: RankWord) -> None:
    if rank == 0:
        sys.stdout.buffer.write(msgspec.json.encode(word) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    raise SystemExit(main())
