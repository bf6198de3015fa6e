"""The bench of attackers fails where a promise is not kept, and counts what good senders have lost."""

from typing import Any

import pytest

from bench import attacker
from pipeline.ledger.ledger import Ledger
from pipeline.messages.submit import Submit
from pipeline.producer import Producer
from pipeline.settings import Settings

GOOD: dict[str, Any] = {
    "memory_above_idle_mib": 120,
    "p99_times_idle": 1.1,
    "p99_times_floods": 2.0,
    "refused": 0,
    "lost": 0,
    "restarts": 0,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_above_idle_mib", 301),
        ("p99_times_idle", 1.21),
        ("p99_times_floods", 3.1),
        ("refused", 1),
        ("lost", 1),
        ("restarts", 1),
    ],
)
def test_each_promise_counts(name: str, value: float) -> None:
    assert not attacker.failed(GOOD)
    assert attacker.failed(GOOD | {name: value})


def test_a_line_that_was_sent_and_is_not_in_is_lost(settings: Settings, ledger: Ledger) -> None:
    producer = Producer(ledger, Submit(None, ledger.client, settings), settings)
    producer.send(["one", "two"], workload="good-http")
    producer.send(["one"], workload="good-syslog/cart")
    assert attacker._lost(settings, {"http": 2, "syslog": 1}) == 0
    assert attacker._lost(settings, {"http": 3, "syslog": 1, "relp": 2}) == 3
