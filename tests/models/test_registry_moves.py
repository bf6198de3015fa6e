"""Moving the live pointer by hand, what became of each version, what is kept, and versions that cannot be
read."""

import json
from datetime import timedelta

import pytest
import redis
from small_bundles import AT, ONE, THREE, TWO, artifact_of, put, root, written

from pipeline.errors import BadBundle, BadInput, LiveChanged, StaleToken
from pipeline.models import bundle
from pipeline.models import registry as module
from pipeline.models.registry import FAULT_TTL_S, HISTORY_KEPT, Registry
from pipeline.records.versions import Live, Note
from pipeline.redis.keys import SHARED
from pipeline.redis.leases import Lease, Leases, granted
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

FOUR = "m000004-0a1b2c3d"


@pytest.fixture
def registry(client: "redis.Redis", settings: Settings) -> Registry:
    return Registry(client, settings)


@pytest.fixture
def held(client: "redis.Redis", settings: Settings) -> Lease:
    return granted(Leases(client, settings).request("training", "trainer"), "training")


def published(registry: Registry, held: Lease, *versions: str, model: str = SHARED) -> Live:
    for version in versions:
        written(registry, version, model=model)
        registry.publish(version, held, at=AT, judgement={"of": version})
    return now(registry, model)


def now(registry: Registry, model: str = SHARED) -> Live:
    live = registry.current(model)
    assert live is not None
    return live


def state(registry: Registry, version: str) -> str:
    note = registry.note(version)
    assert note is not None
    return note.state


def test_rolling_back_goes_one_version_back_at_a_time_and_says_why(registry: Registry, held: Lease) -> None:
    published(registry, held, ONE, TWO, THREE)
    was, live = registry.roll_back(at=AT, reason="too many alerts")
    assert (was, live.version, live.previous, live.how, live.history) == (
        THREE,
        TWO,
        ONE,
        "rolled-back",
        (ONE, TWO),
    )
    assert live.generation == 4, "it takes effect like a publish"
    assert registry.note(THREE) == Note(
        state="rolled-back", reason="too many alerts", at=AT.isoformat(), judgement={"of": THREE}
    )
    assert state(registry, TWO) == "published"
    assert registry.roll_back(at=AT)[1].version == ONE
    note = registry.note(TWO)
    assert note is not None and note.reason == f"an operator went back to {ONE}"
    with pytest.raises(
        BadInput, match=r"no version before the live one of the shared model; .*promote VERSION"
    ):
        registry.roll_back(at=AT)
    assert now(registry).version == ONE


def test_there_is_nothing_to_go_back_to_before_the_first_model(registry: Registry) -> None:
    with pytest.raises(BadInput, match="no version before the live one of the prod/a model"):
        registry.roll_back(model="prod/a", at=AT)


def test_promoting_takes_any_version_whatever_its_judge_said(registry: Registry, held: Lease) -> None:
    published(registry, held, ONE)
    put(registry, TWO)
    registry.write_note(TWO, Note(state="candidate", reason="worse", judgement={"auc": 0.5}))
    live = registry.promote(TWO, at=AT)
    assert (live.version, live.previous, live.how, live.generation) == (TWO, ONE, "promoted", 2)
    assert registry.note(TWO) == Note(
        state="promoted", reason="an operator promoted it", at=AT.isoformat(), judgement={"auc": 0.5}
    )
    assert registry.promote(ONE, at=AT, reason="calmer").history == (ONE, TWO, ONE)
    was, live = registry.roll_back(at=AT)
    assert (was, live.version, live.previous) == (ONE, TWO, ONE)


def test_promoting_what_is_not_there_is_live_or_is_damaged_is_refused(
    registry: Registry, held: Lease
) -> None:
    published(registry, held, ONE)
    with pytest.raises(BadInput, match=f"{ONE} is live already; `logweir models list`"):
        registry.promote(ONE, at=AT)
    for name in (TWO, "nonsense", "../" + ONE, ""):
        with pytest.raises(BadInput, match=r"there is no model .*; `logweir models list`"):
            registry.promote(name, at=AT)
    put(registry, TWO)
    artifact_of(registry, TWO, bundle.WEIGHTS).write_bytes(b"altered")
    with pytest.raises(BadBundle, match="is damaged"):
        registry.promote(TWO, at=AT)
    assert now(registry).generation == 1


def test_going_back_to_damaged_files_is_refused(registry: Registry, held: Lease) -> None:
    published(registry, held, ONE, TWO)
    artifact_of(registry, ONE, bundle.TOKENIZER).unlink()
    with pytest.raises(BadBundle, match="lacks the artifact"):
        registry.roll_back(at=AT)
    assert now(registry).version == TWO


def test_whoever_decided_on_an_older_state_moves_nothing(
    registry: Registry, held: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = published(registry, held, ONE, TWO)
    put(registry, THREE)
    registry.promote(THREE, at=AT)
    monkeypatch.setattr(registry, "current", lambda _model: live)
    for call in (lambda: registry.roll_back(at=AT), lambda: registry.promote(ONE, at=AT)):
        with pytest.raises(BadInput, match=r"another version was made live meanwhile; .*decide again"):
            call()
    monkeypatch.undo()
    assert (now(registry).version, now(registry).generation) == (THREE, 3)
    assert state(registry, TWO) == "published", "what failed leaves no note"


def test_moves_whose_answers_were_lost_happen_once(
    registry: Registry, held: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = Scripts.run

    def twice(self: Scripts, name: str, keys: list[str], args: list[object]) -> object:
        once(self, name, keys, args)
        return once(self, name, keys, args)

    monkeypatch.setattr(Scripts, "run", twice)
    assert published(registry, held, ONE, TWO, THREE).history == (ONE, TWO, THREE)
    assert registry.roll_back(at=AT)[1].history == (ONE, TWO)
    assert registry.promote(THREE, at=AT + timedelta(seconds=1)).history == (ONE, TWO, THREE)
    assert registry.roll_back(at=AT + timedelta(seconds=2))[1].history == (ONE, TWO)
    assert now(registry).generation == 6


def test_what_was_published_is_not_called_lost_when_the_lease_ended_before_the_answer_came(
    registry: Registry, held: Lease
) -> None:
    published(registry, held, ONE)
    registry.client.hset(registry.keys.lease(held.resource), "deadline", 1)
    assert registry.publish(ONE, held, at=AT) == 1


def test_going_back_does_not_let_an_older_trainer_publish(
    registry: Registry, client: "redis.Redis", settings: Settings, held: Lease
) -> None:
    published(registry, held, ONE)
    client.delete(registry.keys.lease("training"))
    second = granted(Leases(client, settings).request("training", "second"), "training")
    published(registry, second, TWO)
    registry.roll_back(at=AT)
    written(registry, THREE)
    client.hset(registry.keys.lease("training"), mapping={"holder": held.holder, "token": held.token})
    with pytest.raises(StaleToken, match=f"{THREE} is not published"):
        registry.publish(THREE, held, at=AT)
    assert now(registry).token == second.token


def test_each_model_has_a_pointer_of_its_own(registry: Registry, held: Lease) -> None:
    published(registry, held, ONE)
    published(registry, held, TWO, THREE, model="prod/a:b")
    assert [(m.model, m.version) for m in registry.live()] == [(SHARED, ONE), ("prod/a:b", THREE)]
    assert registry.roll_back(model="prod/a:b", at=AT)[1].version == TWO
    assert now(registry).version == ONE
    assert registry.current("prod") is None


def test_the_history_is_bounded(registry: Registry, held: Lease) -> None:
    published(registry, held, ONE, TWO)
    for n in range(60):
        registry.promote((ONE, TWO)[n % 2], at=AT + timedelta(seconds=n))
    live = now(registry)
    assert len(live.history) == 50
    assert live.history[-2:] == (ONE, TWO)


def test_a_note_survives_redis_and_an_unreadable_one_is_none(registry: Registry, held: Lease) -> None:
    published(registry, held, ONE)
    registry.client.delete(registry.keys.model(), registry.keys.model_names)
    assert state(registry, ONE) == "published"
    file = root(registry) / "versions" / ONE / "note.json"
    for text in (
        b"",
        b"[]",
        b"5",
        b'{"state": 1}',
        b"\xff",
        b'{"state":"a","reason":"","at":"","judgement":7}',
    ):
        file.write_bytes(text)
        assert registry.note(ONE) is None, text
    assert registry.note(TWO) is None
    assert registry.versions() == [ONE]


def test_a_disk_that_takes_no_note_does_not_cost_the_model(registry: Registry, held: Lease) -> None:
    (root(registry) / "versions" / ONE / "note.json").mkdir(parents=True)
    written(registry, ONE)
    assert registry.publish(ONE, held, at=AT) == 1
    assert registry.note(ONE) is None


# Retention


def versions(registry: Registry, count: int, *, content: bytes = b"content") -> list[str]:
    names = [f"m{n:06d}-0a1b2c3d" for n in range(1, count + 1)]
    for name in names:
        put(registry, name, content=content + name.encode())
        registry.write_note(name, Note(state="candidate"))
    return names


def test_the_oldest_versions_past_the_number_are_removed_with_their_notes(registry: Registry) -> None:
    names = versions(registry, 6)
    registry.keep = 4
    registry.report_fault(names[0], "x")
    assert registry.retire() == names[:2]
    assert registry.versions() == names[2:]
    assert sorted(p.name for p in registry.directory.glob("m*")) == names[2:]
    assert sorted(p.name for p in (root(registry) / "versions").rglob("note.json")) == 4 * ["note.json"]
    assert registry.faults() == []
    assert registry.retire() == []


def test_the_oldest_versions_past_the_size_are_removed(registry: Registry) -> None:
    names = versions(registry, 5, content=b"x" * 100_000)
    size = sum({f.sha256: f.size for f in registry.stored.manifest(names[0]).files.values()}.values())
    size *= len(registry.stored.manifest(names[0]).files)  # equal files are one artifact, counted by each
    registry.keep_bytes = 3 * size + size // 2
    assert registry.retire() == names[:2]


def test_live_versions_and_the_last_of_their_histories_are_kept_whatever_the_limits_say(
    registry: Registry, held: Lease
) -> None:
    names = [f"m{n:06d}-0a1b2c3d" for n in range(1, 8)]
    published(registry, held, *names[:1], model="own")
    published(registry, held, *names[1:])
    registry.promote(names[1], at=AT)
    registry.keep, registry.keep_bytes = 0, 0
    registry.retire()
    kept = {names[0], names[1], *now(registry).history[-HISTORY_KEPT:]}
    assert set(registry.versions()) == kept
    assert registry.roll_back(at=AT)[1].version == names[6]


def test_a_redis_that_forgot_everything_costs_no_more_than_the_limits(
    registry: Registry, held: Lease
) -> None:
    published(registry, held, ONE, TWO, THREE)
    registry.client.delete(registry.keys.model(), registry.keys.model_names)
    assert registry.retire() == []
    registry.keep = 2
    assert registry.retire() == [ONE]


# Versions that cannot be read


def test_a_fault_is_seen_by_all_until_it_is_cleared(registry: Registry, settings: Settings) -> None:
    registry.report_fault(ONE, "damaged " * 200)
    registry.report_fault(TWO, "gone")
    other = Registry(registry.client, settings)
    assert [(f.version, f.machine, len(f.reason)) for f in other.faults()] == [
        (ONE, registry.machine, 500),
        (TWO, registry.machine, 4),
    ]
    other.clear_fault(ONE)
    assert registry.snapshot()[1] == {TWO: "gone"}


def test_a_fault_that_nobody_repeats_is_forgotten(registry: Registry) -> None:
    registry.report_fault(ONE, "x")
    key = registry.keys.model_faults
    assert 0 < int(registry.client.ttl(key)) <= FAULT_TTL_S
    field = f"{ONE} {registry.machine}"
    entry = json.loads(registry.client.hget(key, field) or b"")
    registry.client.hset(key, field, json.dumps(entry | {"at_s": entry["at_s"] - FAULT_TTL_S}))
    assert registry.faults() == []


def test_a_fault_that_cannot_be_read_hides_no_other(registry: Registry) -> None:
    registry.report_fault(ONE, "x")
    for name, text in ((TWO, b"\xff"), (THREE, b"[]"), (FOUR, b'{"reason": 1}')):
        registry.client.hset(registry.keys.model_faults, f"{name} {registry.machine}", text)
    assert [(f.version, f.reason) for f in registry.faults()] == [(ONE, "x")]


def test_the_shared_model_has_one_name() -> None:
    from pipeline.controller import watchlist

    assert module.SHARED == watchlist.SHARED


def test_a_version_judged_against_another_one_than_the_live_is_not_published(
    registry: Registry, held: Lease
) -> None:
    written(registry, ONE)
    assert registry.publish(ONE, held, at=AT, expected=0) == 1
    written(registry, TWO)
    for wrong in (0, 2):
        with pytest.raises(LiveChanged):
            registry.publish(TWO, held, at=AT, expected=wrong)
    assert now(registry).version == ONE
    assert registry.publish(TWO, held, at=AT, expected=1) == 2
    assert registry.publish(TWO, held, at=AT, expected=1) == 2, "an answer that was lost is given again"
