"""Whether a master that has a push may be replaced, told from what the sentinels say."""

from typing import Any

import pytest

from pipeline.redis.sentinels import Sentinels
from pipeline.settings.values import SentinelAddress

ADDRESS = SentinelAddress.parse("sentinel://a,b,c/0?master=main")
RUNS: dict[str, Any] = {
    "runid": "one", "flags": "master", "is_master": True, "is_sdown": False, "is_odown": False,
    "ip": "h", "port": 1, "num-slaves": 2,
}  # fmt: skip
AWAY = "does not answer"


class Saying(Sentinels):
    """Sentinels that say what a test lets them say."""

    def __init__(self, *views: dict[str, Any] | str) -> None:
        super().__init__(ADDRESS)
        self.views, self.questions = views, 0

    def question(self, number: int, _master: str, *, keep: bool = False) -> dict[str, Any] | str:
        self.questions += 1
        return self.views[number]


@pytest.mark.parametrize(
    ("views", "why"),
    [
        ((RUNS, RUNS, RUNS), ""),
        ((RUNS, {**RUNS, "flags": {"master"}}, AWAY), ""),
        ((RUNS, AWAY, AWAY), "most sentinels do not answer"),
        ((RUNS, RUNS, {**RUNS, "flags": "master,failover_in_progress"}), "c:26379 has another master"),
        ((RUNS, {**RUNS, "flags": {"master", "s_down"}}, RUNS), "b:26379 has another master"),
        ((RUNS, {**RUNS, "runid": "two"}, AWAY), "b:26379 has another master"),
    ],
)
def test_a_master_is_trusted_when_most_sentinels_have_it_and_none_replaces_it(
    views: tuple[dict[str, Any] | str, ...], why: str
) -> None:
    found = Saying(*views).replaced("main", "one")
    assert why in found and bool(why) == bool(found)


def test_the_number_of_replicas_is_asked_for_once_a_minute() -> None:
    sentinels = Saying(RUNS, RUNS, RUNS)
    assert [sentinels.replicas("main") for _ in range(3)] == [2, 2, 2]
    assert sentinels.questions == 1
