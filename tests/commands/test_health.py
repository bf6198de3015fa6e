"""What `logweir health` says of workers, on a real Redis and from real heartbeats."""

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from command_line import Verb, command_line

from pipeline.models.registry import Registry
from pipeline.observe.embedded import called, private_url
from pipeline.observe.presence import Pace, Presence, WorkerView
from pipeline.redis.keys import SHARED, WORKER_TTL_S
from pipeline.service.running.health import ANSWERING, liveness_fault
from pipeline.settings import Settings
from pipeline.workers.roles import ROLES


@pytest.fixture
def presence(client: "redis.Redis", settings: Settings) -> Presence:
    return Presence(client, settings)


@pytest.fixture
def logweir(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: "pytest.CaptureFixture[str]"
) -> Iterator[Verb]:
    with command_line(settings, monkeypatch, capsys) as verb:
        yield verb


WELL = Pace(quiet_s=3.0, busy=False, stalled_s=0.0)


def beat(presence: Presence, name: str, role: str, progress: Pace | None = WELL) -> None:
    presence.beat(name=name, role=role, pid=7, queues=(role,), progress=progress)


def silent(presence: Presence, name: str, seconds: float) -> None:
    data = json.loads(presence.client.hget(presence.keys.workers, name) or b"{}")
    data["beat_ms"] -= int(seconds * 1000)
    presence.client.hset(presence.keys.workers, name, json.dumps(data))


def live_model(presence: Presence, version: str) -> None:
    presence.client.hset(
        presence.keys.model(),
        mapping={"version": version, "token": 1, "generation": 1, "published": "2026-11-20T00:00:00+00:00"},
    )
    presence.client.sadd(presence.keys.model_names, SHARED)


def everybody(presence: Presence, **instead: Pace | None) -> None:
    for role in ("ingest", "infer-cpu", "drain", "store", "beat"):
        beat(presence, f"{role}@host", role, instead.get(role, WELL))


def test_a_worker_is_well_while_it_is_heard_and_takes_its_work() -> None:
    def view(**changes: Any) -> WorkerView:
        plain = WorkerView(name="a", role="store", pid=1, queues=("store",), beat_ms=0, progress=WELL)
        return replace(plain, **changes)

    assert liveness_fault(view(), 3, stall_s=30) == ""
    assert liveness_fault(view(progress=None), 3, stall_s=30) == "", "one of an older build tells nothing"
    assert liveness_fault(view(), WORKER_TTL_S, stall_s=30) == "was last heard of 15 s ago"
    deaf = Pace(quiet_s=60, busy=False, stalled_s=31)
    assert (
        liveness_fault(view(progress=deaf), 3, stall_s=30)
        == "takes nothing although work waits, for 31 s now"
    )
    assert liveness_fault(view(progress=deaf, queues=()), 3, stall_s=30) == "stands still, for 31 s now"


def test_the_exit_code_and_one_sentence_say_how_one_worker_is(presence: Presence, logweir: Verb) -> None:
    beat(presence, "store@host", "store")
    done = logweir("health", "store@host")
    assert done.code == 0 and done.out.startswith("store@host is well: heard of "), done.err
    silent(presence, "store@host", 20)
    done = logweir("health", "store@host")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("logweir: store@host was last heard of 2") and done.err.count("\n") == 1
    beat(presence, f"beat@{socket.gethostname()}", "beat")
    assert logweir("health", "beat@").code == 0, "the one of this machine"
    done = logweir("health", "store@elsewhere")
    assert done.code == 1 and "no worker or role 'store@elsewhere'" in done.err


def test_a_role_is_well_when_one_of_its_workers_is(presence: Presence, logweir: Verb) -> None:
    beat(presence, "store@a", "store", Pace(quiet_s=99, busy=False, stalled_s=90))
    assert logweir("health", "store").code == 1
    beat(presence, "store@b", "store")
    assert logweir("health", "store").code == 0
    assert logweir("health", "store@a").code == 1


def test_without_a_name_every_role_that_is_needed_must_be_there(presence: Presence, logweir: Verb) -> None:
    everybody(presence)
    assert logweir("health").out == "5 workers are well\n"
    presence.leave("drain@host")
    done = logweir("health")
    assert done.code == 1 and done.err.startswith("logweir: missing: drain; ")
    facts = json.loads(logweir("health", "--json").out)
    assert facts["ok"] is False and len(facts["workers"]) == 4


def test_ready_means_to_answer_under_the_live_model_where_a_role_answers(
    presence: Presence, logweir: Verb
) -> None:
    everybody(presence)
    assert logweir("health", "--ready").code == 0, "there is no model yet"
    live_model(presence, "m0001-aa")
    done = logweir("health", "ingest@host", "--ready")
    assert done.code == 1 and done.err == "logweir: ingest@host has not loaded m0001-aa yet\n"
    presence.serves("ingest@host", {SHARED: "m0000-00"})
    done = logweir("health", "ingest@host", "--ready")
    assert done.code == 1 and "answers under m0000-00, not yet under m0001-aa" in done.err
    assert logweir("health", "ingest@host").code == 0, "it is alive all the same"
    presence.serves("ingest@host", {SHARED: "m0001-aa"})
    assert logweir("health", "ingest@host", "--ready").code == 0
    assert logweir("health", "store@host", "--ready").code == 0, "it answers under none"


def test_workers_are_not_ready_while_none_can_read_a_version_of_the_model(
    presence: Presence, settings: Settings, logweir: Verb
) -> None:
    everybody(presence)
    live_model(presence, "m000002-aaaaaaaa")
    Registry(presence.client, settings).report_fault(
        "m000002-aaaaaaaa", "an older build made it; train again"
    )
    for args in ((), ("ingest@host",), ("drain",)):
        done = logweir("health", *args, "--ready")
        assert done.code == 1 and done.err == (
            "logweir: no version of the model can be read: m000002-aaaaaaaa: an older build made it; "
            "train again\n"
        )
    assert logweir("health", "store@host", "--ready").code == 0
    assert logweir("health").code == 0, "they are alive all the same"
    presence.serves("ingest@host", {SHARED: "m000001-aaaaaaaa"})
    assert logweir("health", "--ready").code == 0, "the version before serves"


def test_the_roles_that_answer_are_those_that_load_a_version() -> None:
    assert {name for name, role in ROLES.items() if role.profile.part is not None} == ANSWERING


def test_a_redis_that_is_away_is_one_sentence_and_not_well(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: "pytest.CaptureFixture[str]"
) -> None:
    away = settings.replace(redis_url="unix:///nowhere/redis.sock?db=0")
    with command_line(away, monkeypatch, capsys) as verb:
        done = verb("health", "store")
    assert done.code == 1 and done.err.startswith("logweir: Redis at") and done.err.count("\n") == 1


def test_a_heartbeat_tells_how_far_a_worker_has_come(presence: Presence) -> None:
    told = Pace(quiet_s=1.5, busy=True, stalled_s=0.0)
    beat(presence, "store@host", "store", told)
    (view,) = presence.live()
    assert view.progress == told
    beat(presence, "store@host", "store", None)
    (view,) = presence.live()
    assert view.progress is None


def test_embedded_workers_on_a_redis_of_others_have_names_of_their_own(settings: Settings) -> None:
    host, there = socket.gethostname(), settings.replace(data_dir=settings.data.dir / "b")
    assert called(settings, "store", embedded=False) == f"store@{host}"
    names = {called(s, "store", embedded=True) for s in (settings, there)}
    assert len(names) == 2 and all(name.startswith(f"store@{host}-") for name in names)
    private = settings.replace(redis_url=private_url(settings.data.dir))
    assert called(private, "store", embedded=True) == "store"
