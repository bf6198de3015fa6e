"""The watchlist at work: named workloads get models by themselves, all others are counted and skipped by
setting."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from e2e.harness import Up, environment, novel, ordinary, running, until
from e2e.lab import Lab
from pipeline.controller.tick import decisions

ENV = {
    "LOGWEIR_UNWATCHED": "skip",
    "LOGWEIR_OWN_MODELS": "shop/own",
    "LOGWEIR_INTERNAL_TICK_S": "0.25",
    "LOGWEIR_RETRAIN_MIN_LINES": "100",
}
TICKS = 6  # enough for a cause to be answered again, were it not remembered


@dataclass
class Story:
    """What was seen on the way, in order."""

    lab: Lab
    skipped: list[dict[str, int]] = field(default_factory=list)
    empty: dict[str, Any] = field(default_factory=dict)
    short: dict[str, Any] = field(default_factory=dict)
    first: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    listed: dict[str, Any] = field(default_factory=dict)
    own: list[dict[str, Any]] = field(default_factory=list)
    own_versions: list[set[str | None]] = field(default_factory=list)
    removed: list[dict[str, Any]] = field(default_factory=list)
    removed_totals: dict[str, int] = field(default_factory=dict)
    beats: int = 0


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    """A stack with two beats whose watchlist is filled and emptied again."""
    with running(ENV) as up, _second_beat(up):
        story = Story(Lab(up, unwatched="skip", own_models=("shop/own",), tick_s=0.25))
        _off_the_list(story)
        _watched(story)
        _own(story)
        _removed(story)
        story.beats = sum(w.role == "beat" for w in story.lab.presence.live())
        yield story


@contextlib.contextmanager
def _second_beat(up: Up) -> Iterator[None]:
    state = json.loads((up.data / "stack.json").read_text())
    env = {**ENV, "REDIS_URL": state["redis_url"], "LOGWEIR_KEY_PREFIX": state["key_prefix"]}
    with (up.folder / "beat2.log").open("wb") as log:
        beat = subprocess.Popen(
            [sys.executable, "-m", "pipeline.workers.cpu", "beat", "beat2"],
            env=environment(up.mark, {**env, "LOGWEIR_DATA_DIR": str(up.data)}),
            cwd=up.folder,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        beat.terminate()
        beat.wait(20)


def _off_the_list(story: Story) -> None:
    up = story.lab.up
    story.empty = up.status()
    path = up.write(ordinary(30))
    for _ in range(2):  # sent again, it is the same batches
        done = up.logweir("send", path, "--workload", "off/app")
        assert done.returncode == 0, done.stderr
        story.skipped.append(up.settled("off/app"))


def _watched(story: Story) -> None:
    lab, up = story.lab, story.lab.up
    assert up.logweir("watch", "add", "shop/*", "quiet/app").returncode == 0
    # A producer goes by a watchlist that may be a second old; this one is new.
    up.send(ordinary(50), "shop/cart")
    story.short = until(lambda: _waits(lab, "100 are needed"), what="the controller waits for more lines")
    up.send(ordinary(250, start=50), "shop/cart")
    until(lab.registry.current, what="a model appears by itself")
    _idle(lab)
    until(lambda: not up.totals("shop/cart").get("warming"), what="what was stored before is scored")
    story.first = _trainings(lab)
    story.status, story.text = up.status(), up.logweir("status").stdout
    story.listed = json.loads(up.logweir("watch", "list", "--json").stdout)


def _own(story: Story) -> None:
    lab, up = story.lab, story.lab.up
    up.send([*ordinary(60, start=500), *novel(60, "own")], "shop/own")
    until(lambda: lab.registry.current("shop/own"), what="the workload gets its own model")
    _idle(lab)
    story.own = _trainings(lab)
    for workload in ("shop/own", "shop/cart"):
        story.own_versions.append(lab.versions_of(novel(5, "afterown"), workload))


def _removed(story: Story) -> None:
    lab, up = story.lab, story.lab.up
    assert up.logweir("watch", "remove", "shop/*").returncode == 0
    _ticks(lab)
    story.removed = _trainings(lab)
    assert up.logweir("send", up.write(ordinary(20)), "--workload", "shop/cart").returncode == 0
    story.removed_totals = up.settled("shop/cart")


def _trainings(lab: Lab) -> list[dict[str, Any]]:
    found = json.loads(lab.up.logweir("train", "--list", "--json").stdout)
    return sorted(found, key=lambda t: t["created_ms"])


def _waits(lab: Lab, words: str) -> dict[str, Any]:
    decided = lab.up.status()["decisions"].get("shared", {})
    return decided if words in decided.get("why", "") else {}


def _idle(lab: Lab) -> None:
    """Until every training has ended and the controller has decided a few times since."""
    until(lambda: all(t.ended for t in lab.trainings.recent()), what="every training has ended")
    _ticks(lab)


def _ticks(lab: Lab) -> None:
    """Until the controller has decided about the shared model a few times more."""
    seen: set[str] = set()

    def often() -> bool:
        seen.add(decisions(lab.client, lab.registry.keys)["shared"]["at"])
        return len(seen) > TICKS

    until(often, what=f"the controller has decided {TICKS} times")


def test_lines_off_the_watchlist_are_counted_as_skipped_and_sending_them_again_counts_nothing_twice(
    story: Story,
) -> None:
    first, again = story.skipped
    assert (first["accepted"], first["skipped"], first.get("stored", 0)) == (30, 30, 0)
    assert again == first | {"last_ms": again["last_ms"]}
    assert story.lab.up.rows("off/app").is_empty()
    (row,) = story.listed["unwatched"]
    assert (row["workload"], row["lines"], row["skipped"]) == ("off/app", 30, 30)


def test_a_watched_workload_gets_a_model_by_itself_once_there_are_lines_enough(story: Story) -> None:
    assert story.empty["model"] is None
    assert "50 lines" in story.short["why"] and "no logs yet from quiet/app" in story.short["why"]
    (training,) = story.first
    assert (training["asked_by"], training["state"], training["published"]) == (
        "controller",
        "completed",
        True,
    )
    assert training["workloads"] == {"shop/cart": 300}
    assert "shop/cart" in training["why"]
    totals = story.status["workloads"]["shop/cart"]
    assert (totals["stored"], totals["warming"], totals["skipped"], totals["watched"]) == (300, 0, 0, True)


def test_status_shows_the_last_training_and_what_the_controller_decides_next(story: Story) -> None:
    decision = story.status["decisions"]["shared"]
    assert decision["decision"] == "wait" and decision["until"]
    assert decision["facts"]["workload_count"] == 1 and decision["facts"]["lines"] == 300
    assert story.status["training"]["state"] == "completed"
    assert "nothing is due" in story.text and "completed" in story.text and "300 records" in story.text


def test_two_beats_make_one_training_for_one_cause(story: Story) -> None:
    assert story.beats == 2
    assert len(story.first) == 1, "however many decisions followed"
    asked = story.lab.up.events("store", "controller.retrains")
    assert len({e["request"] for e in asked}) == len(asked) == len(story.removed)


def test_a_workload_with_a_model_of_its_own_is_answered_by_it_and_all_others_by_the_shared_one(
    story: Story,
) -> None:
    assert [t["model"] for t in story.own] == ["shared", "shop/own"]
    shared, own = (t["version"] for t in story.own)
    assert story.own_versions == [{own}, {shared}]


def test_a_workload_taken_off_the_watchlist_trains_nothing_and_is_skipped_from_then_on(story: Story) -> None:
    assert story.removed == story.own
    assert story.removed_totals["skipped"] == 20
    assert story.removed_totals["stored"] == 305
