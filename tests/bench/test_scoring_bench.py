"""The scoring bench compares like with like: the best setting of either side, medians over the same turns."""

import pytest

from bench.scoring import Speed, Stint, compared, timed

ONE, TWO = "one thread", "two processes"


def turn(ours: dict[str, float], its: dict[str, float]) -> dict[str, tuple[Speed, Speed]]:
    return {
        name: (Speed(wall=ours[name], cpu=ours[name] / 2), Speed(wall=its[name], cpu=its[name] / 2))
        for name in ours
    }


def test_of_either_side_the_fastest_setting_counts() -> None:
    told = compared([turn({ONE: 900.0, TWO: 1200.0}, {ONE: 30.0, TWO: 20.0})])
    assert (told["lines_per_s"], told["setting"]) == (1200, TWO)
    assert (told["reference_lines_per_s"], told["reference_setting"]) == (30.0, ONE)
    assert told["ratio"] == 40.0
    assert told["ratio_of_each_turn"] == [40.0]
    assert told["lines_per_s_by_setting"] == {ONE: 900, TWO: 1200}
    assert (told["lines_per_cpu_s"], told["reference_lines_per_cpu_s"], told["cpu_ratio"]) == (
        600,
        15.0,
        40.0,
    )


def test_the_peer_in_one_process_is_compared_too() -> None:
    told = compared([turn({ONE: 900.0, TWO: 1800.0}, {ONE: 30.0, TWO: 60.0})])
    assert (told["ratio"], told["ratio_to_one_process"]) == (30.0, 60.0)


def test_one_lucky_turn_moves_nothing() -> None:
    usual = turn({ONE: 900.0, TWO: 800.0}, {ONE: 30.0, TWO: 20.0})
    lucky = turn({ONE: 900.0, TWO: 9000.0}, {ONE: 30.0, TWO: 1.0})
    told = compared([usual, lucky, usual])
    assert (told["lines_per_s"], told["setting"], told["ratio"]) == (900, ONE, 30.0)


def stint(lines: int, began: float, ended: float, cpu: float) -> Stint:
    return Stint(lines=lines, began=began, ended=ended, cpu=cpu)


def test_processes_side_by_side_share_the_time_until_the_last_is_done() -> None:
    passes = [[stint(10, 0.0, 1.0, 1.0), stint(10, 0.5, 2.0, 1.0)], [stint(20, 100.0, 102.0, 3.0)]]
    assert Speed.of(passes) == Speed(wall=10.0, cpu=8.0)


def test_what_is_timed_is_the_scoring_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 7.0
    monkeypatch.setattr("bench.scoring.time.perf_counter", lambda: now)
    monkeypatch.setattr("bench.scoring.time.process_time", lambda: 2 * now)

    def score(lines: object) -> None:
        nonlocal now
        now += 2.0

    assert timed(score, ["a", "b"]) == stint(2, 7.0, 9.0, 4.0)
