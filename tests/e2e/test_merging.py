"""A flood of small batches with unknown lines on a real stack: few passes of the model, and every line scored
once by a process."""

from collections.abc import Iterator

import pytest

from e2e.harness import Up, novel, ordinary, running, until

ENV = {
    "LOGWEIR_INFER_PROCESSES": "2",
    "LOGWEIR_INTERNAL_BATCH_RECORDS": "25",
    "LOGWEIR_INTERNAL_STALL_S": "60",
}
SCORERS = ("infer-cpu", "infer-cpu-2")
BATCHES, EACH = 120, 25


@pytest.fixture(scope="module")
def flooded() -> Iterator[Up]:
    with running(ENV) as up:
        up.send(ordinary(300), "base")
        done = up.logweir("train", "--json")
        assert done.returncode == 0, done.stderr
        until(lambda: up.totals("base").get("warming", 0) == 0, what="warming lines are judged")
        yield up


def counted(up: Up) -> tuple[int, int]:
    """(lines scored, passes) so far, of all scoring processes."""
    with up.client() as client:
        key = "{logweir}:metrics:infer-cpu"
        names = ["logweir_scored_lines_total|device=cpu", "logweir_score_seconds_count|device=cpu"]
        lines, passes = client.hmget(key, names)
    return int(float(lines or 0)), int(float(passes or 0))


def test_small_batches_are_scored_in_few_passes_and_a_process_scores_a_line_once(flooded: Up) -> None:
    up = flooded
    known = up.rows("base")["pattern_id"].n_unique()
    until(lambda: counted(up)[0] >= known, what="what was scored of the first lines is counted")
    _, passes_before = counted(up)
    # Every line stands in four batches.
    lines = novel(BATCHES * EACH // 4, "flood") * 4
    with up.frozen(*SCORERS):
        sent = up.logweir("send", up.write(lines), "--workload", "flood", "--json")
        assert sent.returncode == 0, sent.stderr

        def waiting() -> int:
            with up.client() as client:
                return int(client.hget("{logweir}:counts", "stage:infer") or 0)

        until(lambda: waiting() == BATCHES, what="all batches wait to be scored")
    totals = up.settled("flood")
    assert (totals["accepted"], totals["stored"]) == (len(lines), len(lines))
    rows = up.rows("flood")
    assert rows["line"].to_list() == list(range(1, len(lines) + 1)), "each line is stored once"
    assert rows["score"].null_count() == 0
    distinct = rows["pattern_id"].n_unique()
    assert distinct >= len(lines) // 8
    until(lambda: counted(up)[0] >= known + distinct, what="what was scored is counted")
    scored, passes = counted(up)
    assert scored <= len(SCORERS) * (known + distinct), "by each process once at most"
    assert passes - passes_before <= BATCHES // 8
    steps = [e["batch"] for name in SCORERS for e in up.events(name, "batch.step")]
    assert len(steps) == len(set(steps)) >= BATCHES, "each batch by one of them"
