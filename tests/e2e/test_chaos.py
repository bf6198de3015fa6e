"""A short chaos run with a fixed seed: everything is broken for some minutes, and in the end every line is
there once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MINUTES = 2.0
SEED = 47  # 38 faults in two minutes, the hang early
# A fault that needs a process which another one has just ended may come to nothing; all the others must have
# been done.
FAULTS = 25
# In s. It takes under four minutes; a machine that is busy starts the stack, settles and stops it more
# slowly.
RUN_S = 780.0
END_S = 90.0  # it stops the stack and unmounts its disk
ROOT = Path(__file__).resolve().parents[2]


def run(log: Path, *options: str) -> tuple[int, str]:
    """The exit code of the bench and what it printed; asked to end when it takes too long, so that it cleans
    up."""
    with (
        log.open("wb") as err,
        subprocess.Popen(
            [sys.executable, "-m", "bench", "chaos", *options, "--json"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=err, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            out = process.communicate(timeout=RUN_S)[0]
        except BaseException:  # the time-out of the test itself and an interrupt too
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    return process.returncode, out


@pytest.mark.timeout(900)
def test_nothing_is_lost_or_doubled_while_everything_is_broken(tmp_path: Path) -> None:
    log = tmp_path / "bench.log"
    try:
        code, out = run(log, "--minutes", str(MINUTES), "--seed", str(SEED), "--keep", str(tmp_path))
    finally:
        # The faults, and the first violation with its trace: shown when this fails.
        print(log.read_text(encoding="utf-8", errors="replace")[-6_000:])
    assert out, code
    found = json.loads(out)
    assert (found["lost"], found["doubled"], found["violations"]) == (0, 0, 0), found
    assert found["dead"] == found["dead_poison"] > 0, found
    assert found["faults"] >= FAULTS, found
    assert found["stored_lines"] + found["dead"] == found["accepted_lines"] > 1_000, found
    # How soon is for runs on machines that do nothing else (--apart).
    assert found["recovery"]["never"] == 0, found
    assert code == 0, found
