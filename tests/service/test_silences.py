"""Silences: which causes they cover, until when, and where that leaves an incident."""

from datetime import UTC, datetime, timedelta

import pytest
import redis

from pipeline.errors import BadInput, NotFound
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.service import silences
from pipeline.service.access.audit import read_audit
from pipeline.service.incident_decisions import decide_incident
from pipeline.service.incidents import read_incident, read_incidents, silences_in_use
from pipeline.service.silences import SilenceCover, end_silence, put_silence, read_silences
from pipeline.service.values import Action, CauseView, IncidentState, IncidentView, SilenceView
from pipeline.settings import Settings
from pipeline.watching.incidents.live import IncidentEvent, Incidents

NOW = datetime.now(UTC).replace(microsecond=0)  # of the import: a test may come half an hour later
HOUR = timedelta(hours=1)


def silence(workload: str = "prod/shop/*", **how: object) -> SilenceView:
    given = {
        "id": "a",
        "template": None,
        "service": "",
        "until": NOW + HOUR,
        "why": "w",
        "by": "ada",
        "at": NOW,
    }
    return SilenceView(workload=workload, **(given | how))  # type: ignore[arg-type]


def cause(workload: str = "prod/shop/cart", mark: str | None = "T1") -> CauseView:
    return CauseView(
        workload=workload, cause="template:1", kind="template", first=NOW, last=NOW, count=1, score=0.9,
        severity=3, text="full", source="", line=0, new=False, timed=True, mark=mark,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("one", "covered"),
    [
        (silence(), True), (silence("prod/shop"), True), (silence("prod/bank"), False), (silence("*"), True),
        (silence(template="T1"), True), (silence(template="T2"), False), (silence(service="cart"), True),
        (silence(service="c*"), True), (silence("*", service="web"), False),
        (silence(until=NOW + timedelta(seconds=1)), True), (silence(until=NOW), False),
    ],
)  # fmt: skip
def test_a_silence_covers_workloads_templates_and_services_until_its_end(
    one: SilenceView, covered: bool
) -> None:
    assert bool(SilenceCover([one], NOW).of_cause("prod/shop/cart", "T1")) == covered


def test_an_incident_is_silenced_where_all_of_its_causes_are() -> None:
    shop, bank = silence(id="shop"), silence("prod/bank", id="bank")
    both = [cause(), cause("prod/bank/web")]
    opened, kept = IncidentState.OPEN, SilenceCover([shop], NOW)
    assert kept.state_of(opened, both) == (IncidentState.OPEN, ["shop"])
    assert SilenceCover([shop, bank], NOW).state_of(opened, both) == (
        IncidentState.SILENCED,
        ["bank", "shop"],
    )
    assert SilenceCover([], NOW).state_of(opened, both) == (IncidentState.OPEN, [])
    for state in IncidentState:
        settled = state in (IncidentState.RESOLVED, IncidentState.SNOOZED)
        assert kept.state_of(state, [cause()])[0] is (state if settled else IncidentState.SILENCED)


class World:
    """One incident of two workloads, as two machines see it."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client, self.settings, self.other = client, settings, connect(settings)
        state = Incidents()
        state.add(
            IncidentEvent(
                event_id=name, workload=name, cause="template:1", kind="template", first=NOW, last=NOW + 12 * HOUR, count=1,
                score=0.9, severity=3, text="full", source="a.log", line=1,
            )
            for name in ("prod/shop/cart", "prod/shop/web")
        )  # fmt: skip
        client.set(Keys(settings.redis.key_prefix).watching("incidents"), state.pack())

    def seen(self, now: datetime = NOW) -> IncidentView:
        """By the other machine."""
        (found,) = read_incidents(self.other, self.settings, now).incidents
        assert read_incident(self.other, self.settings, now, found.id).incident == found
        return found

    def put(self, workload: str, lasts: str = "1h", **how: str) -> SilenceView:
        return put_silence(
            self.client, self.settings, workload, lasts=lasts, **({"why": "w", "by": "ada"} | how)
        )


@pytest.fixture
def world(client: "redis.Redis", settings: Settings) -> World:
    return World(client, settings)


def test_another_machine_sees_a_silence_at_once_and_its_end(world: World) -> None:
    cart = world.put("prod/shop/cart", service="cart", template="1")
    assert (world.seen().state, world.seen().silences) == ("open", [cart.id])
    rest = world.put("prod/shop", why=" maintenance ")
    assert world.seen().state == "silenced" and len(world.seen().causes) == 2
    assert world.seen(datetime.now(UTC) + 2 * HOUR).state != "silenced"  # by itself
    held = silences_in_use(world.other, world.settings, NOW)
    assert {(one.id, one.incidents, one.expired) for one in held} == {
        (cart.id, 1, False),
        (rest.id, 1, False),
    }
    view = decide_incident(world.client, world.settings, world.seen().id, Action.ACKNOWLEDGE, by="bob")
    assert view.state == "silenced" and view.decision is not None
    ended = end_silence(world.client, world.settings, rest.id[:5], by="bob")
    assert ended.expired and world.seen(datetime.now(UTC)).state == "acknowledged"
    shown = {one.id: one for one in read_silences(world.other, world.settings, datetime.now(UTC))}
    assert shown[rest.id] == ended and shown[rest.id].why == "maintenance"
    log = read_audit(world.client, world.settings, limit=9, cursor=None).entries
    assert [(one.by, one.action, one.target) for one in log if one.action.startswith("silence")] == [
        ("bob", "silence.end", rest.id), ("ada", "silence.begin", rest.id), ("ada", "silence.begin", cart.id)
    ]  # fmt: skip


def test_silences_have_bounds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for how, words in (
        ({"lasts": "91d"}, "at most 90d"), ({"lasts": "soon"}, "is no length of a silence"),
        ({"lasts": "0s"}, "is no length of a silence"),
        ({"lasts": "9" * 30 + "d"}, "is no length of a silence"), ({"why": "  "}, "needs a reason"),
        ({"why": "a\x1b[31m"}, "needs a reason"), ({"why": "x" * 501}, "needs a reason"),
        ({"template": "web"}, "is no template"), ({"service": "a/b"}, "has a slash"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=words):
            world.put("prod/shop", **how)
    with pytest.raises(BadInput, match="no workload pattern"):
        world.put("")
    for name in ("", "nothing"):
        with pytest.raises(NotFound, match="no silence has an id"):
            end_silence(world.client, world.settings, name, by="ada")
    assert read_silences(world.client, world.settings, NOW) == []
    monkeypatch.setattr(silences, "MOST_SILENCES", 2)
    first = world.put("a")
    world.put("b")
    with pytest.raises(BadInput, match="the limit"):
        world.put("c")
    end_silence(world.client, world.settings, first.id, by="ada")
    with pytest.raises(BadInput, match="the limit"):  # it is shown for a while
        world.put("c")
    monkeypatch.setattr(silences, "SHOWN_FOR", timedelta(0))
    kept = world.put("c")
    assert {one.workload for one in read_silences(world.client, world.settings, NOW)} == {"b", kept.workload}
