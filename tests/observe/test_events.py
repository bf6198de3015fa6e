"""Events of a real Redis: of the step that decides, once each, in pages that a reader goes on behind."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from command_line import Verb
from hypothesis import given
from hypothesis import strategies as st
from pool_devices import put_devices
from small_bundles import AT, ONE, TWO, written

from pipeline.controller.training_status import TrainingState
from pipeline.controller.trainings import TrainingRequest, Trainings
from pipeline.errors import BadInput
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Need
from pipeline.models.registry import PromoteArgs, Registry
from pipeline.observe import events as module
from pipeline.observe.events import CloudEvent, id_before, newest_event_id, read_events
from pipeline.redis.arguments import named_arguments
from pipeline.redis.keys import Keys
from pipeline.redis.leases import TRAINING, Lease, Leases, granted
from pipeline.settings import Settings
from pipeline.watching.incidents.live import IncidentEvent, Incidents
from pipeline.watching.incidents.transitions import incident_transitions

START = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)


@pytest.fixture
def lease(client: "redis.Redis", settings: Settings) -> Lease:
    return granted(Leases(client, settings).request(TRAINING, "trainer"), TRAINING)


def told(client: "redis.Redis", settings: Settings, *types: str) -> list[CloudEvent]:
    return read_events(client, settings, since=module.BEGIN, types=types).events


def kinds(client: "redis.Redis", settings: Settings) -> list[tuple[str, str]]:
    return [(event.type, event.subject) for event in told(client, settings)]


def test_a_model_that_becomes_live_is_told_in_the_step_that_moves_the_pointer(
    client: "redis.Redis", settings: Settings, lease: Lease
) -> None:
    registry = Registry(client, settings)
    for version in (ONE, TWO):
        written(registry, version)
        registry.publish(version, lease, at=AT)
    registry.publish(TWO, lease, at=AT)  # the answer was lost, so it is asked again
    registry.roll_back(at=AT)
    again = PromoteArgs(version=ONE, generation=2, at=AT.isoformat(), model="shared", how="rolled-back")
    keys = [registry.keys.model(), registry.keys.model_names, registry.keys.events]
    registry.scripts.run("models/promote", keys, [named_arguments(again)])
    lost = granted(Leases(client, settings).request("other", "zombie"), "other")
    with pytest.raises(Exception, match="was lost"):
        registry.publish(TWO, replace(lost, resource=TRAINING), at=AT)
    shown = [(e.subject, e.data["how"], e.data["before"]) for e in told(client, settings, "model.live")]
    assert shown == [(ONE, "published", ""), (TWO, "published", ONE), (ONE, "rolled-back", TWO)]
    first = told(client, settings)[0]
    assert (first.specversion, first.source) == ("1.0", f"logweir:{settings.redis.key_prefix}")
    assert abs(first.time - datetime.now(UTC)) < timedelta(minutes=1)
    assert first.data == {
        "version": ONE,
        "model": "shared",
        "how": "published",
        "generation": 1,
        "before": "",
    }


def test_a_training_is_told_when_it_starts_and_ends_and_its_model_when_it_is_rejected(
    client: "redis.Redis", settings: Settings, lease: Lease
) -> None:
    trainings = Trainings(client, settings)
    trainings.request(TrainingRequest(why="a test", asked_by="run"))
    taken = trainings.take(lease)
    assert taken is not None
    status, request = taken
    first = status.request_id
    rejected = replace(status, state=TrainingState.COMPLETED, version=ONE, reason="it knows less")
    assert trainings.end(rejected, lease) and not trainings.end(rejected, lease)
    waits, _ = trainings.request(TrainingRequest(model="prod/a"))
    trainings.cancel(waits)
    assert kinds(client, settings) == [
        ("training.started", first), ("model.rejected", ONE), ("training.ended", first),
        ("training.ended", waits),
    ]  # fmt: skip
    started, model, ended, cancelled = told(client, settings)
    assert started.data == {
        "training": first, "model": "shared", "asked_by": "run", "why": "a test", "attempt": 1, "retry_of": ""
    }  # fmt: skip
    assert (model.data["reason"], model.data["training"]) == ("it knows less", first)
    assert (ended.data["state"], ended.data["published"]) == ("completed", False)
    assert (cancelled.data["state"], cancelled.data["model"]) == ("cancelled", "prod/a")
    # A trainer that fails is tried again, and the event says as what.
    trainings.request(request)
    taken = trainings.take(lease)
    assert taken is not None
    trainings.end(replace(taken[0], state=TrainingState.FAILED, reason="x"), lease, retry=request)
    failed = told(client, settings, "training.ended")[-1]
    assert failed.data["retried_as"] == trainings.followed(taken[0].request_id).request_id
    assert told(client, settings, "model.*") == [model]


def test_leases_of_gpus_are_told_without_their_tokens(client: "redis.Redis", settings: Settings) -> None:
    pool = Pool(client, settings)
    put_devices(pool, 1)
    held = pool.request(Need(memory_mib=1024, compute_percent=20), holder="a", request_id="one")
    pool.request(Need(memory_mib=1024, compute_percent=20), holder="b", request_id="two")
    pool.release(held)
    pool.revoke("two", "a test")
    pool.revoke("two", "a test")
    assert kinds(client, settings) == [
        ("lease.granted", "one"), ("lease.granted", "two"), ("lease.ended", "one"), ("lease.ended", "two"),
    ]  # fmt: skip
    granted_one, *_, released, revoked = told(client, settings)
    assert granted_one.data["devices"] == [
        {"device": held.parts[0].uuid, "memory_mib": 1024, "compute_percent": 20}
    ]
    assert (released.data["ended"], revoked.data["ended"], revoked.data["why"]) == (
        "released", "revoked", "a test"
    )  # fmt: skip
    assert "token" not in str([event.data for event in told(client, settings)])


def seen(cause: str, seconds: float) -> IncidentEvent:
    moment = START + timedelta(seconds=seconds)
    return IncidentEvent(
        event_id=f"{cause} {seconds}", workload="shop", cause=cause, kind="template", first=moment, last=moment,
        count=1, score=0.9, severity=3, text=f"{cause} failed",
    )  # fmt: skip


def after(state: Incidents, now: float, *events: IncidentEvent) -> list[tuple[str, str]]:
    before = state.all()
    state.add(events)
    state.close(START + timedelta(seconds=now))
    return [(kind, data) for kind, _, data in incident_transitions(before, state.all())]


def test_an_incident_opens_once_and_closes_when_its_causes_are_over() -> None:
    state = Incidents()
    (opened,) = after(state, 10, seen("disk", 0), seen("db", 5))
    assert (
        opened[0] == "incident.opened" and '"causes":2' in opened[1] and '"title":"disk failed"' in opened[1]
    )
    assert after(state, 20, seen("disk", 15)) == []
    assert after(state, 60) == []
    (closed,) = after(state, 3_600)
    assert closed[0] == "incident.closed" and '"why":"its causes are over"' in closed[1]
    assert after(state, 7_200) == []
    # Old lines bring an incident that is over already.
    assert [kind for kind, _ in after(state, 100_000, seen("old", 50_000))] == ["incident.closed"]


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 4_000), st.integers(0, 2_000)), max_size=12)
)
def test_followers_know_at_any_time_which_incidents_are_open(steps: list[tuple[str, int, int]]) -> None:
    """A state that is packed between two rounds, as Redis keeps it."""
    state, known, now = Incidents(), set[str](), 0
    for cause, back, forth in steps:
        now += forth
        state = Incidents.unpack(state.pack())
        before = state.all()
        state.add([seen(cause, now - back)])
        state.close(START + timedelta(seconds=now))
        for kind, name, _ in incident_transitions(before, state.all()):
            assert (name in known) is (kind == "incident.closed") or kind == "incident.closed"
            (known.add if kind == "incident.opened" else known.discard)(name)
        assert known == {incident.id for incident in state.all() if incident.open}


def put(client: "redis.Redis", settings: Settings, *types: str, **options: Any) -> None:
    for kind in types:
        fields: Any = {"type": kind, "subject": "s", "data": "{}"}
        client.xadd(Keys(settings.redis.key_prefix).events, fields, **options)


def test_pages_hold_every_event_once_and_a_gap_is_told(
    client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_events(client, settings).last == newest_event_id(client, settings) == module.BEGIN
    monkeypatch.setattr(module, "READ_AT_ONCE", 3)
    put(client, settings, *["model.live", "lease.ended", "lease.granted"] * 4)
    every = told(client, settings)
    assert len({event.id for event in every}) == 12
    newest = read_events(client, settings, limit=5, types=["lease.*"])
    assert newest.events == [event for event in every if event.type.startswith("lease")][-5:]
    found, since = [], module.BEGIN
    while page := read_events(client, settings, since=since, limit=2, types=["model.*", "lease.ended"]):
        if not page.events:
            break
        found += page.events
        since = page.last
    assert [event.id for event in found] == [e.id for e in every if e.type != "lease.granted"]
    assert page.last == newest_event_id(client, settings) == every[-1].id
    past = read_events(client, settings, since=id_before(every[0].time - timedelta(hours=1)))
    assert past.events == every and not past.gap
    monkeypatch.setattr(module, "KEPT", 6)
    put(client, settings, "model.live", maxlen=6, approximate=False)
    assert read_events(client, settings, since=every[0].id).gap
    assert not read_events(client, settings, since=every[-1].id).gap
    for wrong in ("x", "1-", "1-99999999999999999999", "-1-1"):
        with pytest.raises(BadInput, match="no id of an event"):
            read_events(client, settings, since=wrong)
    with pytest.raises(BadInput, match="no event has the type 'modle'; use one of model"):
        read_events(client, settings, types=["modle"])


def test_the_stream_is_bounded(client: "redis.Redis", settings: Settings, lease: Lease) -> None:
    stream, pipe = Keys(settings.redis.key_prefix).events, client.pipeline()
    for _ in range(module.KEPT + 500):
        pipe.xadd(stream, {"type": "lease.ended"})
    pipe.execute()
    registry = Registry(client, settings)
    written(registry, ONE)
    registry.publish(ONE, lease, at=AT)
    assert module.KEPT <= client.xlen(stream) <= module.KEPT + 200
    assert read_events(client, settings, limit=1).events[0].type == "model.live"


def test_the_verb_prints_events_and_says_what_is_wrong(
    client: "redis.Redis", settings: Settings, logweir: Verb
) -> None:
    assert "no events yet" in logweir("events").out
    put(client, settings, "model.live", "training.ended")
    first, second = told(client, settings)
    assert first.id in logweir("events").out
    behind = logweir("events", "--since", first.id)
    assert second.id in behind.out and first.id not in behind.out
    assert second.id in logweir("events", "--since", "1h", "--type", "training.*").out
    assert logweir("events", "--since", "1h", "--limit", "1").out.count("\n") == 1
    assert '"specversion": "1.0"' in logweir("events", "--json").out
    wrong = logweir("events", "--since", "never")
    assert wrong.code == 2 and "or the id of an event such as" in wrong.err
    assert logweir("events", "--follow", "--limit", "3").code == 2
