"""What people decide of incidents, and the state that follows."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest
import redis

from pipeline.errors import BadInput, NotFound
from pipeline.redis.keys import Keys
from pipeline.service import incident_decisions
from pipeline.service.access.audit import read_audit
from pipeline.service.handover import notes
from pipeline.service.incident_decisions import decide_incident
from pipeline.service.incident_states import incident_state, read_decisions
from pipeline.service.incidents import read_incidents
from pipeline.service.values import Action, Decision, IncidentState, IncidentView
from pipeline.settings import Settings
from pipeline.watching.incidents.live import IncidentEvent, Incidents

NOW = datetime.now(UTC).replace(microsecond=0)
MINUTE = timedelta(minutes=1)


class Kept:
    """Incidents as the watcher keeps them."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client, self.settings, self.state = client, settings, Incidents()

    def saw(self, at: datetime, workload: str = "shop/web", cause: int = 1) -> None:
        event = IncidentEvent(
            event_id=uuid.uuid4().hex, workload=workload, cause=f"template:{cause}", kind="template", first=at,
            last=at, count=1, score=0.9, severity=3, text="disk full", source="a.log", line=1,
        )  # fmt: skip
        self.state.add([event])
        self.client.set(Keys(self.settings.redis.key_prefix).watching("incidents"), self.state.pack())

    @property
    def one(self) -> IncidentView:
        (found,) = read_incidents(self.client, self.settings, NOW).incidents
        return found

    def decide(self, action: Action, **how: object) -> Decision | None:
        how = {"by": "ada"} | how
        return decide_incident(self.client, self.settings, self.one.id, action, **how).decision  # type: ignore[arg-type]

    def state_at(self, now: datetime = NOW) -> IncidentState:
        decided = read_decisions(self.client, self.settings)
        return incident_state(decided.get(self.one.id), now, self.one)


@pytest.fixture
def kept(client: "redis.Redis", settings: Settings) -> Kept:
    found = Kept(client, settings)
    found.saw(NOW - 2 * MINUTE)
    return found


def test_steps_lead_to_their_states_and_back(kept: Kept) -> None:
    assert kept.state_at() == "open"
    for action, state in (
        (Action.ACKNOWLEDGE, "acknowledged"),
        (Action.RESOLVE, "resolved"),
        (Action.SNOOZE, "snoozed"),
        (Action.ACKNOWLEDGE, "acknowledged"),
    ):
        decided = kept.decide(action, why="looking")
        assert kept.state_at() == state == (decided and decided.state)
    assert kept.decide(Action.REOPEN) is None and kept.state_at() == "open"
    assert read_decisions(kept.client, kept.settings) == {}
    log = read_audit(kept.client, kept.settings, limit=10, cursor=None).entries
    assert [one.action for one in log] == [
        f"incident.{step}" for step in ("reopen", "acknowledge", "snooze", "resolve", "acknowledge")
    ]


def test_a_decision_is_read_as_it_was_made(kept: Kept) -> None:
    made = kept.decide(Action.SNOOZE, lasts="7d", why="until the new disk is there")
    assert read_decisions(kept.client, kept.settings) == {kept.one.id: made}
    assert made and made.by == "ada" and made.workloads == ("shop/web",)
    assert made.until and abs(made.until - made.at - timedelta(days=7)) < timedelta(seconds=1)


def test_a_resolved_incident_whose_causes_come_back_has_regressed(kept: Kept) -> None:
    kept.decide(Action.RESOLVE)
    assert kept.state_at() == "resolved"
    kept.saw(NOW - MINUTE)
    assert kept.state_at() == "regressed"
    kept.decide(Action.RESOLVE)
    assert kept.state_at() == "resolved"


def test_a_line_that_came_while_somebody_resolved_is_not_lost(kept: Kept) -> None:
    seen = kept.one.last
    kept.saw(NOW - MINUTE)  # after the page was opened, before the button
    kept.decide(Action.RESOLVE, seen=seen)
    assert kept.state_at() == "regressed"
    kept.decide(Action.RESOLVE, seen=NOW + timedelta(days=365))  # nobody has seen lines of the future
    kept.saw(NOW)
    assert kept.state_at() == "regressed"


def test_a_snooze_ends_at_its_time(kept: Kept) -> None:
    decided = kept.decide(Action.SNOOZE, lasts="15m")
    assert decided and decided.until
    assert kept.state_at(decided.until - timedelta(milliseconds=1)) == "snoozed"
    assert kept.state_at(decided.until) == "open"


def test_a_snooze_ends_when_the_incident_reaches_another_workload(kept: Kept) -> None:
    kept.decide(Action.SNOOZE, lasts="1d")
    kept.saw(NOW - 2 * MINUTE, cause=2)
    assert kept.state_at() == "snoozed"
    kept.saw(NOW - 2 * MINUTE, workload="shop/db")
    assert set(kept.one.workloads) == {"shop/db", "shop/web"}
    assert kept.state_at() == "open"


def test_a_snooze_ends_after_so_many_more_lines(kept: Kept) -> None:
    decided = kept.decide(Action.SNOOZE, lasts="1d", more=2)
    assert decided and decided.until_count == kept.one.count + 2 == 3
    assert read_decisions(kept.client, kept.settings) == {kept.one.id: decided}
    kept.saw(NOW - MINUTE)
    assert kept.one.count == 2 and kept.state_at() == "snoozed" == kept.one.state
    kept.saw(NOW - MINUTE)
    assert kept.state_at() == "open" == kept.one.state
    for more in (0, -1, 10**9 + 1):
        with pytest.raises(BadInput, match="more lines is none"):
            kept.decide(Action.SNOOZE, more=more)


def test_an_incident_ends_unless_somebody_resolved_it(kept: Kept) -> None:
    view = kept.one
    ended = IncidentView(**{name: getattr(view, name) for name in view.__slots__} | {"open": False})
    assert incident_state(None, NOW, ended) == "ended"
    for action, state in (
        (Action.ACKNOWLEDGE, "ended"),
        (Action.RESOLVE, "resolved"),
        (Action.SNOOZE, "snoozed"),
    ):
        assert incident_state(kept.decide(action), NOW, ended) == state


def test_a_step_that_cannot_be_taken_says_why(kept: Kept) -> None:
    with pytest.raises(NotFound, match="there is no incident"):
        decide_incident(kept.client, kept.settings, "nothing", Action.RESOLVE, by="ada")
    with pytest.raises(NotFound, match="there is no incident"):
        kept.decide(Action.RESOLVE, only=("other/*",))
    for lasts in ("0s", "-1h", "91d", "soon", "9" * 30 + "d"):
        with pytest.raises(BadInput):
            kept.decide(Action.SNOOZE, lasts=lasts)
    assert kept.state_at() == "open"


def test_notes_stand_in_their_order_and_have_an_end(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "MOST_NOTES", 2)
    for text in (" disk\r\nswapped ", "calm again"):
        notes.add_note(kept.client, kept.settings, kept.one.id, text, by="ada")
    found = notes.read_notes(kept.client, kept.settings, kept.one.id)
    assert [(one.by, one.text) for one in found] == [("ada", "disk\nswapped"), ("ada", "calm again")]
    with pytest.raises(BadInput, match="2 notes"):
        notes.add_note(kept.client, kept.settings, kept.one.id, "more", by="ada")
    assert (
        0 < kept.client.ttl(Keys(kept.settings.redis.key_prefix).incident_notes(kept.one.id)) <= 90 * 86_400
    )
    (newest, *_) = read_audit(kept.client, kept.settings, limit=10, cursor=None).entries
    assert (newest.action, newest.details) == ("incident.note", {"chars": 10})


def test_the_oldest_decisions_go_first(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident_decisions, "MOST_DECISIONS", 2)
    decided = kept.decide(Action.ACKNOWLEDGE)
    assert decided
    key, entry = Keys(kept.settings.redis.key_prefix).incident_states, incident_decisions._entry(decided)
    for age in (1, 2):
        at = (decided.at - timedelta(days=age)).isoformat()
        kept.client.hset(key, f"old{age}", incident_decisions.json.dumps(entry | {"at": at}))
    kept.decide(Action.RESOLVE)
    assert set(read_decisions(kept.client, kept.settings)) == {kept.one.id, "old1"}
