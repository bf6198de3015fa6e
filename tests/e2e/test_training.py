"""Trainings on a real stack: killed at every stage, queued, merged, cancelled; the live model is never taken
away."""

import json
import os
import shutil
import signal
from collections.abc import Iterator

import polars as pl
import pytest
from small_bundles import manifest_of

from e2e.harness import Up, novel, running, sentence, until, varied
from e2e.lab import RUNNING, Lab, flip_a_byte, stopping
from pipeline.controller.training_status import TrainingState
from pipeline.redis.leases import TRAINING

LEASE_TTL_MS = 4000
SWEEP_S = 0.5
ENV = {
    "LOGWEIR_INTERNAL_LEASE_TTL_MS": str(LEASE_TTL_MS),
    "LOGWEIR_INTERNAL_SWEEP_S": str(SWEEP_S),
    "LOGWEIR_OWN_MODELS": "own/*",
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A stack of its own with a live model; nothing is watched, so nobody else asks for trainings."""
    with running(ENV | stopping(tmp_path_factory.mktemp("site"))) as up:
        up.send(varied(600), "base")
        lab = Lab(up, lease_ttl_ms=LEASE_TTL_MS, own_models=("own/*",))
        done = lab.ended(lab.ask())
        assert done.published, done
        lab.serving(done.version, "ingest-1", "infer-cpu", "drain")
        yield lab


# ---- killed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "victim"),
    [
        (TrainingState.FETCHING, "child"),
        pytest.param(TrainingState.TRAINING, "child", marks=pytest.mark.nightly),
        (TrainingState.TRAINING, "worker"),
        (TrainingState.JUDGING, "child"),
        (TrainingState.PUBLISHING, "child"),
    ],
)
def test_a_trainer_killed_at_any_stage_leaves_the_live_model_and_begins_again_by_itself(
    lab: Lab, stage: TrainingState, victim: str
) -> None:
    before = lab.live()
    with lab.observed() as seen:
        with lab.stopped_at(stage) as (request_id, child):
            (child if victim == "child" else lab.worker("train")).kill()
        holder = _holder(lab)
        assert lab.live() == before
        assert lab.versions_of(novel(5, f"{stage}{victim}"), "meanwhile") == {before.version}
        _freed(lab, holder)
        ended = lab.reached(request_id, TrainingState.FAILED)
        last = lab.ended(request_id)
    assert f"the trainer died while {stage}" in ended.reason and "tried again" in ended.reason
    assert (last.state, last.retry_of, last.attempt) == (TrainingState.COMPLETED, request_id, 2), last
    assert seen.states[last.request_id][0] == TrainingState.QUEUED
    listed = json.loads(lab.up.logweir("train", "--list", "--json").stdout)
    shown = next(t for t in listed if t["request_id"] == request_id)
    assert (shown["state"], shown["reason"]) == ("failed", ended.reason)
    assert lab.live().version == (last.version if last.published else before.version)


def test_a_trainer_killed_after_the_pointer_has_moved_leaves_a_whole_model_live_and_is_done(lab: Lab) -> None:
    before = lab.live()
    with lab.observed():
        with lab.stopped_at("moved") as (request_id, child):
            child.kill()
        holder, after = _holder(lab), lab.live()
        assert after.version != before.version and after.previous == before.version
        lab.registry.manifest(after.version)
        lab.serving(after.version, "ingest-1")  # nobody is left to send the hint
        assert lab.versions_of(novel(5, "moved"), "meanwhile") == {after.version}
        _freed(lab, holder)
        ended = lab.ended(request_id)
    assert (ended.request_id, ended.state, ended.published) == (request_id, TrainingState.COMPLETED, True)
    assert (ended.version, lab.live()) == (after.version, after)


def test_a_trainer_that_stood_still_past_its_lease_publishes_nothing_when_it_goes_on(lab: Lab) -> None:
    before = lab.live()
    with lab.observed():
        with lab.stopped_at(TrainingState.PUBLISHING) as (request_id, _):
            made = lab.trainings.status(request_id).version
            lab.reached(request_id, TrainingState.FAILED)
            assert lab.live() == before
        last = lab.ended(request_id)
    assert (last.state, last.retry_of, last.attempt) == (TrainingState.COMPLETED, request_id, 2), last
    chain = [t for t in lab.trainings.recent() if request_id in (t.request_id, t.retry_of)]
    assert len(chain) == 2, "it was queued again once, by the sweep"
    assert made not in lab.live().history and last.version != made


def _holder(lab: Lab) -> str:
    holder = lab.leases.holder_of(TRAINING)
    assert holder, "a trainer holds the lease while it works"
    return holder


def _freed(lab: Lab, holder: str) -> None:
    """The lease of a dead trainer is free after its time, and what it left is swept up; 2 s for a busy
    machine."""
    within_s = LEASE_TTL_MS / 1000 + SWEEP_S + 2.0
    until(lambda: lab.leases.holder_of(TRAINING) != holder, within_s=within_s, what="the lease is free")


def test_requests_survive_a_stack_that_is_killed_outright(lab: Lab) -> None:
    first = lab.ask("once")
    lab.reached(first, TrainingState.TRAINING)
    second = lab.ask("twice")
    live = lab.live()
    os.kill(lab.up.process.pid, signal.SIGKILL)
    lab.up.process.wait(10)
    lab.up.process = Up(lab.up.folder, lab.up.logweir.extra).wait_ready().process
    lab.attach()
    assert lab.live() == live
    with lab.observed():
        ended = [lab.ended(request_id) for request_id in (first, second)]
    assert [status.state for status in ended] == [TrainingState.COMPLETED] * 2
    assert ended[0].retry_of == first and "died while training" in lab.trainings.status(first).reason
    assert ended[1].request_id == second


# ---- side by side ------------------------------------------------------------------------------------


def test_lines_are_scored_all_the_time_while_a_model_is_trained_and_published(lab: Lab) -> None:
    before = lab.live()

    def stored() -> int:
        return int(lab.up.totals("flow").get("stored", 0))

    with lab.feeding("flow", lambda n: novel(10, "flow" + "abcdefghij"[n % 10] * (n // 10))):
        until(lambda: stored() > 0, what="the first lines are stored")
        # The trainer stands still in this stage. On a slow machine its lease lapses, and it is tried again.
        with lab.stopped_at(TrainingState.TRAINING) as (request_id, _):
            for _ in range(3):
                so_far = stored()
                until(lambda: stored() > so_far, what="lines are stored during the training")  # noqa: B023
        done = lab.ended(request_id)
        assert done.published, done.reason
        lab.serving(done.version, "ingest-1")
        assert lab.versions_of(novel(3, "afterwards"), "flow") == {done.version}
    totals = lab.up.settled("flow")
    assert totals["accepted"] == totals["stored"] and not totals.get("dead")
    rows = lab.up.rows("flow")
    assert rows.height == rows["record_id"].n_unique() == totals["stored"]
    assert set(rows["model_version"].to_list()) == {before.version, done.version}


def test_a_request_waits_while_one_runs_an_equal_one_is_merged_and_each_can_be_cancelled(lab: Lab) -> None:
    def command(*words: str) -> dict[str, object]:
        done = lab.up.logweir("train", "--json", *words)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    live = lab.live()
    ask = ("--no-wait", "--workload", "base", "--exclude")
    with lab.training_lease():
        first, again, other = (command(*ask, word) for word in ("a", "a", "b"))
        assert first["request_id"] == again["request_id"] != other["request_id"]
        assert (first["state"], other["state"]) == ("queued", "queued")
        assert lab.up.status()["trainings_waiting"] == 2
        assert command("--cancel", str(first["request_id"]))["answer"] == "cancelled"
        assert lab.trainings.status(str(first["request_id"])).state is TrainingState.CANCELLED
        assert lab.trainings.status(str(other["request_id"])).state is TrainingState.QUEUED
    runs = str(other["request_id"])
    lab.reached(runs, TrainingState.TRAINING)
    assert lab.trainings.cancel(runs) == "asked"
    assert lab.reached(runs, TrainingState.CANCELLED).reason == "an operator cancelled it"
    assert lab.live() == live
    until(lambda: lab.leases.holder_of(TRAINING) is None, what="the lease is given back")
    assert "nothing to cancel" in sentence(lab.up.logweir("train", "--cancel"))


# ---- which model answers -----------------------------------------------------------------------------


def test_promote_and_rollback_hold_from_the_next_batch_on_while_a_training_runs(lab: Lab) -> None:
    first = lab.live()
    second = lab.copy_of(first.version)
    assert lab.versions_of(novel(30, "ownlines"), "own/app") == {first.version}, "no own model yet"
    # The training is of another model, so that its end changes nothing here.
    request_id = lab.ask(model="own/app", workload="own/app")
    with lab.observed():
        lab.reached(request_id, *RUNNING)
        done = lab.up.logweir("models", "promote", second, "--reason", "a test")
        assert done.returncode == 0, done.stderr
        assert lab.versions_of(novel(3, "promoted"), "next") == {second}
        done = lab.up.logweir("models", "rollback", "--json")
        assert done.returncode == 0, done.stderr
        assert lab.versions_of(novel(3, "rolledback"), "next") == {first.version}
        assert json.loads(done.stdout)["before"] == second
        own = lab.ended(request_id)
    assert own.published, own
    # Its rows carry its version now, all others the shared one.
    assert lab.versions_of(novel(3, "ownagain"), "own/app") == {own.version}
    assert lab.versions_of(novel(3, "shared"), "next") == {first.version}
    models = {m["model"]: m["version"] for m in lab.up.status()["models"]}
    assert models == {"shared": first.version, "own/app": own.version}


@pytest.mark.parametrize("damage", ["a byte", "the directory"])
def test_a_live_model_whose_files_break_is_replaced_by_the_one_before_and_status_says_so(
    lab: Lab, damage: str
) -> None:
    good = lab.live().version
    bad = lab.copy_of(good)
    assert lab.up.logweir("models", "promote", bad).returncode == 0
    lab.serving(bad, "ingest-1", "infer-cpu", "drain")
    # On this machine and in the store: a copy alone would be fetched again. `good` has the same artifacts.
    if damage == "a byte":
        flip_a_byte(manifest_of(lab.registry, bad))
        flip_a_byte(lab.registry.path(bad) / "model.safetensors")
    else:
        lab.registry.stored.objects.delete(f"versions/{bad}/manifest.json")
        shutil.rmtree(lab.registry.path(bad))
    lab.pool_child("infer-cpu").kill()  # the next one has to read the model
    assert lab.versions_of(novel(10, "broken" + damage[-4:]), "damage") == {good}
    assert not lab.up.totals("damage").get("dead")
    facts = lab.up.status()
    assert bad in facts["model_faults"] and facts["model"]["version"] == bad
    assert bad in lab.up.logweir("status").stdout.partition("fault")[2]
    assert lab.up.logweir("models", "rollback").returncode == 0
    assert lab.versions_of(novel(10, "healed" + damage[-4:]), "damage") == {good}
    assert not lab.up.status()["model_faults"]


# ---- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["train", "--workload", "nosuch/*"], 2, ("'nosuch/*'", "logweir status")),
        (["train", "--since", "2099-01-01T00:00:00Z"], 2, ("lies in the future",)),
        (["train", "--since", "1h", "--until", "2h"], 2, ("is not before",)),
        (["train", "--since", "soon"], 2, ("'soon'", "15m")),
        (["train", "--cancel", "nosuch"], 2, ("'nosuch'", "--list")),
        (["models", "promote", "m000009-00000000"], 2, ("m000009-00000000", "models list")),
        (["models", "promote"], 2, ("needs a version",)),
        (["models", "rollback", "--model", "nobody"], 2, ("no version before", "nobody", "promote")),
        (["watch", "remove", "nosuch"], 2, ("'nosuch'", "watch list")),
        (["watch", "add", "a\tb"], 2, (r"'a\tb'", "prod/shop/*")),
        (["watch", "list", "shop"], 2, ("'shop'", "takes no workload")),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence_with_the_remedy(
    lab: Lab, args: list[str], code: int, words: tuple[str, ...]
) -> None:
    said = sentence(lab.up.logweir.inside(*args), code)
    assert all(word in said for word in words), said


def test_too_few_lines_to_train_on_are_told_with_how_many_are_needed(lab: Lab) -> None:
    live = lab.live()
    lab.versions_of(["only one line"], "few")
    said = sentence(lab.up.logweir("train", "--workload", "few"), 1)
    assert "1 distinct lines in 1 records" in said and "2 distinct lines and 20 records are needed" in said
    said = sentence(lab.up.logweir("train", "--workload", "base", "--since", "1s"), 1)
    assert "no line of base is stored since" in said
    assert lab.live() == live


def test_an_empty_watchlist_says_that_nothing_is_trained_and_how_to_change_that(lab: Lab) -> None:
    listed = lab.up.logweir("watch", "list")
    assert listed.returncode == 0 and "nothing is watched" in listed.stdout and "base" in listed.stdout
    why = until(lambda: lab.up.status()["decisions"].get("shared"), what="the controller has decided")["why"]
    assert "nothing is watched" in why and "logweir watch add" in why
    assert "nothing is watched" in lab.up.logweir("status").stdout
    assert pl.DataFrame(json.loads(lab.up.logweir("watch", "list", "--json").stdout)["unwatched"]).height


def test_known_good_lines_are_learnt_and_never_judged(lab: Lab) -> None:
    """`send --baseline` declares good times to a running stack, as `run --baseline` does."""
    workload, up = "known-good", lab.up
    path = up.write(varied(300))
    for _ in range(2):  # the second time adds nothing
        done = up.logweir("send", path, "--workload", workload, "--baseline", "--wait", "--json")
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["lines"] == 0
    assert up.rows(workload).is_empty()
    totals = up.totals(workload)
    assert (totals["stored"], totals.get("warming", 0)) == (300, 0)  # a baseline waits for no model
    done = up.logweir("train", "--workload", workload, "--json")
    version = json.loads(done.stdout)["version"]
    shown = json.loads(up.logweir("models", "show", version, "--json").stdout)
    assert (shown["learnt_from"], shown["stats"]["lines"]) == ({workload: "baseline"}, 300)
    # The same file may be judged as well: it has a cursor and batch ids of its own.
    done = up.logweir("send", path, "--workload", workload, "--wait", "--json")
    assert json.loads(done.stdout)["lines"] == 300
    assert up.rows(workload)["lines"].sum() == 300
