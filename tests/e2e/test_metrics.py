"""Metrics of a real stack: what Prometheus reads while lines flow and workers die, and that the stack does
not depend on it."""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.harness import Up, novel, ordinary, running, until


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with running({"LOGWEIR_METRICS": "yes", "LOGWEIR_METRICS_PORT": "20100"}) as stack:
        yield stack


def scrape(up: Up) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their labels, which are in the order of the labels' names; empty
    while nobody answers."""
    try:
        with urllib.request.urlopen(up.facts["metrics"], timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    families = text_string_to_metric_families(text)
    return {
        (s.name, *(value for _, value in sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


def state(up: Up) -> dict[str, Any]:
    return dict(json.loads((up.data / "stack.json").read_text()))


def test_counters_follow_the_lines_and_outlive_their_workers(up: Up) -> None:
    assert up.status()["metrics"] == up.facts["metrics"]
    up.send(ordinary(300), "shop/app")
    stored = ("logweir_lines_total", "stored")
    until(lambda: scrape(up).get(stored) == 300, what="300 lines are stored")
    done = ("logweir_steps_total", "done", "store")
    before = until(lambda: scrape(up).get(done), what="the step was pushed")
    starts = ("logweir_worker_starts_total", "store")
    assert scrape(up)[starts] == 1
    os.kill(state(up)["workers"]["store"], signal.SIGKILL)
    until(lambda: scrape(up).get(starts) == 2, what="the store worker was started again")
    assert scrape(up)[done] >= before
    up.send(novel(50, "fresh"), "shop/other")  # lines that nobody knows go through every stage
    until(lambda: scrape(up)[done] > before, what="the next process counts on")
    samples = scrape(up)
    assert samples["logweir_workers", "ingest"] == 1 and samples["logweir_redis_up",] == 1
    assert samples["logweir_verdict_lookups_total", "miss"] > 0
    assert not any("shop" in word for names in samples for word in names)


def test_an_exporter_that_dies_is_started_again_at_its_place_and_nothing_waits_for_it(up: Up) -> None:
    until(lambda: scrape(up), what="it answers")
    (first,) = state(up)["metrics_pids"]
    os.kill(first, signal.SIGKILL)
    until(lambda: state(up)["metrics_pids"] not in ([], [first]), what="it is started again")
    until(lambda: scrape(up).get(("logweir_redis_up",)) == 1, what="it is back at its place")
