"""The controller's decisions: what asks for a training, what never does, and a week of both."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from pipeline.controller.decide import Retrain, Wait, decide, to_json
from pipeline.controller.drift import Drift
from pipeline.controller.facts import Attempt, AttemptOutcome, Facts, History, RetrainRules, facts_to_json
from pipeline.controller.tick import MEMORIES, Memory
from pipeline.errors import BadPayload
from pipeline.settings import Settings

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
RULES = RetrainRules.of_settings(Settings())
NAMES = ("shop/cart", "shop/pay", "shop/web", "core/dns", "core/auth")
SETTLED = (AttemptOutcome.COMPLETED, AttemptOutcome.CANDIDATE, AttemptOutcome.CANCELLED)
modest = effort(max_examples=60, deadline=None)  # a busy machine is no fault


def drift(novelty: float = 0.0, unknown: float = 0.0, score: float = 0.0, *, ready: bool = True) -> Drift:
    return Drift(
        version="v1", ready=ready, lines=20_000, needed=20_000, novelty=novelty, unknown=unknown, score=score,
        novelty_then=0.012, novelty_now=0.012 + novelty, unknown_then=0.0, unknown_now=unknown,
    )  # fmt: skip


def calm(**more: object) -> Facts:
    """A model of an hour ago that knows both workloads; nothing is due."""
    lines = {"shop/cart": 40_000, "shop/pay": 2_000}
    last = Attempt(at=NOON - HOUR, outcome=AttemptOutcome.COMPLETED, causes=(), lines=lines)
    facts = Facts(
        now=NOON, model="shared", watching=True, workloads=lines, trained=frozenset(lines),
        live_since=NOON - HOUR, history=History(last=last), drift=drift(),
    )  # fmt: skip
    return replace(facts, **more)  # type: ignore[arg-type]


def retrain(facts: Facts, rules: RetrainRules = RULES) -> Retrain:
    decision = decide(facts, rules)
    assert isinstance(decision, Retrain), decision
    return decision


def wait(facts: Facts, rules: RetrainRules = RULES) -> Wait:
    decision = decide(facts, rules)
    assert isinstance(decision, Wait), decision
    return decision


def ended(facts: Facts, decision: Retrain, outcome: AttemptOutcome, *, after: timedelta = HOUR / 4) -> Facts:
    """The facts when the training that was asked for has ended so, and nothing else has changed."""
    at = facts.now + after
    attempt = Attempt(
        at=at, outcome=outcome, causes=decision.causes, lines=facts.workloads, reason="no memory"
    )
    return replace(facts, now=at, history=facts.history.after(attempt))


# One cause at a time


def test_the_first_model_is_trained_as_soon_as_there_are_lines() -> None:
    facts = Facts(now=NOON, model="shared", watching=True, workloads={"shop/cart": 1_000, "shop/pay": 0})
    decision = retrain(facts)
    assert decision.causes == ("addition",)
    assert decision.workloads == ("shop/cart",)
    assert decision.reason == "no training has been made yet: shop/cart"


def test_an_added_workload_asks_for_a_training_of_all() -> None:
    facts = calm(workloads={"shop/cart": 40_000, "shop/pay": 2_000, "core/dns": 5, "core/auth": 7})
    decision = retrain(facts)
    assert decision.reason == "2 workloads were added: core/auth, core/dns"
    assert decision.workloads == ("core/auth", "core/dns", "shop/cart", "shop/pay")


def test_an_added_workload_without_lines_asks_for_nothing_and_is_named() -> None:
    facts = calm(workloads={"shop/cart": 40_000, "core/dns": 0}, silent=("ghost/*",))
    assert wait(facts).why.endswith("no logs yet from core/dns, ghost/*")


def test_a_workload_that_comes_back_after_a_training_without_it_is_an_addition_again() -> None:
    lines = {"shop/cart": 40_000}
    gone = Attempt(at=NOON - HOUR, outcome=AttemptOutcome.COMPLETED, causes=(), lines=lines)
    facts = calm(history=History(last=gone), trained=frozenset(lines))
    assert retrain(facts).reason == "1 workload was added: shop/pay"


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        (drift(novelty=0.079), "drift: 9.1 % of lines have a new template, 1.2 % when the model was new"),
        (drift(unknown=0.2), "drift: 20.0 % of words are unknown, 0.0 % when the model was new"),
        (drift(score=0.4), "drift: the scores have a stability index of 0.40, 0.25 is allowed"),
    ],
)  # fmt: skip
def test_each_kind_of_drift_is_a_cause(moved: Drift, words: str) -> None:
    decision = retrain(calm(drift=moved))
    assert (decision.causes, decision.reason) == (("drift",), words)


def test_drift_that_is_not_measured_yet_is_no_cause() -> None:
    assert "drift is measured from" in wait(calm(drift=drift(0.9, 0.9, 9.0, ready=False))).why


def test_a_model_of_an_older_build_is_a_cause_that_rests() -> None:
    facts = calm(outdated=True)
    decision = retrain(facts)
    assert decision.reason == "an older build made the live model, which this one cannot read"
    rests = ended(facts, decision, AttemptOutcome.CANDIDATE)
    assert wait(rests).until == rests.now + 2 * HOUR, "it asked again soon after the one before"
    later = ended(facts, decision, AttemptOutcome.FAILED)
    assert retrain(replace(later, now=later.now + HOUR)).causes == decision.causes


def test_many_new_lines_are_a_cause() -> None:
    grown = {"shop/cart": 5_040_000, "shop/pay": 2_000}
    assert retrain(calm(workloads=grown)).causes == ("volume",)
    wait(calm(workloads=grown | {"shop/cart": 5_039_999}))


def test_a_count_that_fell_hides_no_new_lines_of_others() -> None:
    assert retrain(calm(workloads={"shop/cart": 0, "shop/pay": 5_002_000})).causes == ("volume",)


def test_an_old_model_is_a_cause() -> None:
    assert retrain(calm(now=NOON + 23 * HOUR)).causes == ("age",)
    assert wait(calm()).until == NOON + 23 * HOUR


def test_a_time_of_day_is_a_cause_once() -> None:
    facts = calm(scheduled=NOON - HOUR / 2)
    decision = retrain(facts)
    assert decision.causes == ("schedule",)
    wait(ended(facts, decision, AttemptOutcome.CANCELLED))


def test_a_time_of_day_that_a_training_for_another_cause_has_served_asks_for_nothing() -> None:
    wait(calm(scheduled=NOON - 2 * HOUR))


def test_one_training_answers_every_cause_that_holds() -> None:
    facts = calm(now=NOON + 30 * HOUR, drift=drift(0.5, 0.5, 5.0), scheduled=NOON)
    facts = replace(facts, workloads={**facts.workloads, "core/dns": 6_000_000})
    decision = retrain(facts)
    assert decision.causes == ("addition", "schedule", "drift", "volume", "age")
    wait(ended(facts, decision, AttemptOutcome.CANDIDATE))


# Waiting


def test_an_empty_watchlist_says_how_to_add() -> None:
    decision = wait(Facts(now=NOON, model="shared", watching=False, workloads={"shop/cart": 10**9}))
    assert decision.until is None
    assert "logweir watch add" in decision.why


def test_too_few_lines_are_told_with_both_figures() -> None:
    decision = wait(
        Facts(now=NOON, model="shared", watching=True, workloads={"shop/cart": 12, "shop/pay": 0})
    )
    assert decision.why == (
        "12 lines of 1 watched workload stored, 1,000 are needed (retrain_min_lines); no logs yet from "
        "shop/pay"
    )
    assert decision.until is None


def test_patterns_that_match_nothing_are_named() -> None:
    decision = wait(Facts(now=NOON, model="shared", watching=True, silent=("shop/*", "core/x")))
    assert decision.why == "no line of a watched workload is stored yet: shop/*, core/x"


def test_a_model_to_which_nothing_belongs_says_so() -> None:
    assert "belongs to this model" in wait(Facts(now=NOON, model="shared", watching=True)).why


def test_the_next_time_of_day_is_waited_for_when_it_comes_first() -> None:
    assert wait(calm(scheduled_next=NOON + HOUR)).until == NOON + HOUR
    assert wait(calm(scheduled_next=NOON + 2 * DAY)).until == NOON + 23 * HOUR


def test_calm_is_told_with_its_figures() -> None:
    assert wait(calm(workloads={"shop/cart": 40_500, "shop/pay": 2_000})).why == (
        "nothing is due: 500 of 5,000,000 new lines; the last training is 60.0 minutes of 24.0 hours old; "
        "drift:"
        " 0.0 % more lines with a new template, 0.0 % more unknown words, stability index 0.00"
    )


def test_a_version_that_was_taken_back_is_not_replaced_for_the_age_of_the_old_one() -> None:
    facts = calm()
    old = replace(facts, live_since=NOON - 30 * DAY)
    back = Attempt(at=NOON, outcome=AttemptOutcome.ROLLED_BACK, causes=(), lines={})
    after = replace(old, history=old.history.after(back))
    assert wait(after).until == NOON + DAY


def test_taking_a_version_back_leaves_what_was_learnt_and_answered() -> None:
    facts = calm(drift=drift(novelty=0.5))
    done = ended(facts, retrain(facts), AttemptOutcome.COMPLETED)
    back = Attempt(at=NOON, outcome=AttemptOutcome.ROLLED_BACK, causes=(), lines={})  # told later than it was
    history = done.history.after(back)
    assert (history.last.at, history.last.lines) == (done.now, facts.workloads)
    wait(replace(done, history=history))


# Failures


def test_the_back_off_doubles_up_to_an_hour() -> None:
    facts = calm(now=NOON + DAY)
    waits = []
    for _ in range(12):
        facts = ended(facts, retrain(facts), AttemptOutcome.FAILED)
        decision = wait(facts)
        assert decision.until is not None
        assert "failed: no memory; the next try is not before" in decision.why
        waits.append((decision.until - facts.now).total_seconds())
        facts = replace(facts, now=decision.until)
    assert waits == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600, 3600, 3600, 3600]
    assert retrain(facts).reason.endswith("(the last 12 trainings failed: no memory)")


def test_thousands_of_failures_wait_an_hour() -> None:
    history = replace(calm().history, failures=5_000, failed_at=NOON)
    assert wait(calm(history=history)).until == NOON + HOUR


def test_success_ends_the_back_off() -> None:
    facts = calm(now=NOON + DAY)
    failed = ended(facts, retrain(facts), AttemptOutcome.FAILED)
    later = replace(failed, now=failed.now + HOUR)
    done = ended(later, retrain(later), AttemptOutcome.COMPLETED)
    assert (done.history.failures, done.history.failure) == (0, "")


def test_what_a_failed_training_was_for_is_asked_for_again() -> None:
    facts = calm(workloads={"shop/cart": 40_000, "core/dns": 5})
    first = retrain(facts)
    failed = ended(facts, first, AttemptOutcome.FAILED)
    assert retrain(replace(failed, now=failed.now + HOUR)).causes == first.causes


# Properties

times = st.integers(0, 200).map(lambda hours: NOON - hours * HOUR)
workloads = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 8_000_000))
shares = st.floats(0, 1)


@st.composite
def histories(draw: st.DrawFn) -> History:
    last = None
    if draw(st.booleans()):
        causes = draw(st.lists(st.sampled_from(["drift", "age"]), unique=True))
        last = Attempt(
            at=draw(times),
            outcome=draw(st.sampled_from(SETTLED)),
            causes=tuple(causes),
            lines=draw(workloads),
        )
    failures = draw(st.integers(0, 5))
    return History(
        last=last,
        vain=draw(st.integers(0, 9)),
        failures=failures,
        failed_at=draw(times) if failures else None,
        failure="it broke" if failures else "",
    )


@st.composite
def situations(draw: st.DrawFn, *, busy: bool = False) -> Facts:
    watched = draw(workloads)
    moved = drift(draw(shares), draw(shares), draw(shares), ready=draw(st.booleans()))
    return Facts(
        now=NOON,
        model=draw(st.sampled_from(["shared", "shop/cart"])),
        watching=draw(st.booleans()) or bool(watched),
        workloads=watched,
        silent=tuple(draw(st.lists(st.sampled_from(["x/*", "y/*"]), unique=True))),
        trained=frozenset(draw(st.sets(st.sampled_from(NAMES)))),
        outdated=draw(st.booleans()),
        live_since=draw(st.none() | times),
        history=draw(histories()),
        busy=busy,
        drift=draw(st.none() | st.just(moved)),
        scheduled=draw(st.none() | times),
        scheduled_next=draw(st.none() | st.just(NOON + 3 * HOUR)),
    )


@modest
@given(situations())
def test_equal_facts_give_the_equal_decision(facts: Facts) -> None:
    assert decide(facts, RULES) == decide(replace(facts), RULES)


@modest
@given(situations(busy=True))
def test_nothing_is_asked_while_a_training_is_queued_or_runs(facts: Facts) -> None:
    wait(facts)


@modest
@given(situations(), st.sets(st.sampled_from(NAMES)))
def test_a_removal_never_asks_for_a_training(facts: Facts, removed: set[str]) -> None:
    if isinstance(decide(facts, RULES), Wait):
        left = {name: lines for name, lines in facts.workloads.items() if name not in removed}
        wait(replace(facts, workloads=left))


@modest
@given(situations(), st.sampled_from(SETTLED))
def test_an_answered_cause_asks_again_after_a_rest_at_the_earliest(
    facts: Facts, outcome: AttemptOutcome
) -> None:
    decision = decide(facts, RULES)
    if isinstance(decision, Retrain):
        wait(ended(facts, decision, outcome))


@modest
@given(situations(), st.floats(0, 0.999))
def test_after_a_failure_nothing_is_asked_before_the_back_off_and_the_same_after_it(
    facts: Facts, part: float
) -> None:
    decision = decide(facts, RULES)
    if isinstance(decision, Retrain):
        failed = ended(facts, decision, AttemptOutcome.FAILED)
        until = wait(failed).until
        assert until is not None
        assert wait(replace(failed, now=failed.now + part * (until - failed.now))).until == until
        again = retrain(replace(failed, now=until))
        assert set(again.causes) >= set(decision.causes)


@modest
@given(situations(), shares, shares, shares, st.dictionaries(st.sampled_from(NAMES), st.integers(0, 10**6)))
def test_more_drift_and_more_lines_never_turn_a_training_into_a_wait(
    facts: Facts, novelty: float, unknown: float, score: float, lines: dict[str, int]
) -> None:
    decision = decide(facts, RULES)
    if isinstance(decision, Retrain):
        more = {name: count + lines.get(name, 0) for name, count in facts.workloads.items()}
        facts = replace(facts, workloads=lines | more)
        old = facts.drift
        if old is not None:
            worse = drift(old.novelty + novelty, old.unknown + unknown, old.score + score, ready=old.ready)
            facts = replace(facts, drift=worse)
        retrain(facts)


@modest
@given(situations())
def test_a_wait_ends_at_the_time_it_names(facts: Facts) -> None:
    decision = decide(facts, RULES)
    if isinstance(decision, Wait) and decision.until is not None:
        assert decision.until > facts.now
        scheduled = facts.scheduled_next if decision.until == facts.scheduled_next else facts.scheduled
        then = decide(replace(facts, now=decision.until, scheduled=scheduled), RULES)
        # After a back-off there may be nothing left to do.
        assert isinstance(then, Retrain) or facts.history.failures
        assert then != decision


@modest
@given(situations())
def test_what_is_trained_is_watched_and_has_lines(facts: Facts) -> None:
    decision = decide(facts, RULES)
    if isinstance(decision, Retrain):
        assert decision.workloads
        assert all(facts.workloads[name] > 0 for name in decision.workloads)
        assert sum(facts.workloads[name] for name in decision.workloads) >= RULES.min_lines


# Records


@modest
@given(situations())
def test_a_decision_and_its_facts_are_plain_json(facts: Facts) -> None:
    for record in (to_json(decide(facts, RULES)), facts_to_json(facts)):
        assert json.loads(json.dumps(record)) == record


@modest
@given(histories())
def test_a_history_survives_json(history: History) -> None:
    memory = Memory(history=history)
    assert MEMORIES.from_json(MEMORIES.to_json(memory)) == memory


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"v": 1, "history": {"last": 3, "failures": 0, "failed_at": null}}']
)
def test_a_damaged_history_is_refused(text: str) -> None:
    with pytest.raises(BadPayload, match="memory"):
        MEMORIES.from_json(text)


def test_hundreds_of_workloads_give_short_texts_and_small_records() -> None:
    many = {f"cluster-{n}/{'namespace' * 30}/deployment-{n}": 10_000 + n for n in range(900)}
    facts = calm(workloads=many, silent=tuple(f"ghost-{n}/{'x' * 500}" for n in range(500)))
    decision = retrain(facts)
    assert len(decision.workloads) == 900
    assert decision.reason.startswith("900 workloads were added: cluster-0/")
    assert "and 895 more" in decision.reason
    quiet = wait(replace(facts, workloads=dict.fromkeys(many, 0)))
    assert max(len(decision.reason), len(quiet.why)) < 1_000
    record = to_json(decision), facts_to_json(facts)
    assert len(json.dumps(record)) < 25_000
    assert (record[0]["workload_count"], record[1]["workload_count"]) == (900, 900)


def test_a_long_reason_of_a_failure_is_cut() -> None:
    failed = ended(calm(now=NOON + DAY), retrain(calm(now=NOON + DAY)), AttemptOutcome.FAILED)
    attempt = Attempt(at=failed.now, outcome=AttemptOutcome.FAILED, causes=(), lines={}, reason="x" * 100_000)
    assert len(wait(replace(failed, history=failed.history.after(attempt))).why) < 500


# A week


class Week:
    """Ticks every ten minutes, applies each decision, and counts trainings by their first cause.

    A training takes twenty minutes. `outcomes`: of the trainings to come, completed when there are none left.
    """

    def __init__(self, rules: RetrainRules = RULES) -> None:
        self.rules = rules
        self.begin = NOON
        self.lines = {"shop/cart": 0, "shop/pay": 0}
        self.rate = 50  # lines per tick and workload
        self.shifted = False  # the stream holds templates that the live model has not seen
        self.outcomes: list[AttemptOutcome] = []
        self.history = History()
        self.live: datetime | None = None
        self.version = 0
        self.trained: frozenset[str] = frozenset()
        self.running: tuple[datetime, Retrain, dict[str, int]] | None = None
        self.counts: dict[str, int] = {}
        self.now = NOON
        self.began: list[datetime] = []
        self.daily: int | None = None  # hour of a scheduled training

    def end(self) -> None:
        assert self.running is not None
        _, decision, lines = self.running
        outcome = self.outcomes.pop(0) if self.outcomes else AttemptOutcome.COMPLETED
        attempt = Attempt(at=self.now, outcome=outcome, causes=decision.causes, lines=lines, reason="killed")
        self.history = self.history.after(attempt)
        if outcome is AttemptOutcome.COMPLETED:
            self.live, self.trained, self.version = self.now, frozenset(lines), self.version + 1
            self.shifted = False
        self.running = None

    def facts(self) -> Facts:
        last = nominal = None
        if self.daily is not None:
            nominal = self.now.replace(hour=self.daily, minute=0)
            last = nominal if nominal <= self.now else nominal - DAY
            nominal = last + DAY
        measured = drift(0.3 if self.shifted else 0.0)
        return Facts(
            now=self.now, model="shared", watching=bool(self.lines), workloads=dict(self.lines),
            trained=self.trained, live_since=self.live, history=self.history, busy=self.running is not None,
            drift=replace(measured, version=f"v{self.version}") if self.live else None,
            scheduled=last, scheduled_next=nominal,
        )  # fmt: skip

    def go(self, hours: float, *, controller: bool = True) -> "Week":
        """The stream runs for so long; without a controller nobody decides."""
        for _ in range(round(hours * 6)):
            self.now += timedelta(minutes=10)
            for name in self.lines:
                self.lines[name] += self.rate
            if self.running is not None and self.now - self.running[0] >= timedelta(minutes=20):
                self.end()
            if not controller:
                continue
            decision = decide(self.facts(), self.rules)
            if isinstance(decision, Retrain):
                kind = decision.causes[0]
                self.began.append(self.now)
                self.counts[kind] = self.counts.get(kind, 0) + 1
                self.running = (self.now, decision, dict(self.lines))
        return self


def test_a_quiet_week_trains_once_at_first_and_then_daily_by_age() -> None:
    assert Week().go(7 * 24).counts == {"addition": 1, "age": 6}


def test_a_week_of_events_trains_once_for_each() -> None:
    week = Week(replace(RULES, age_s=30 * 86_400, volume_lines=100_000))
    week.go(24)
    assert week.counts == {"addition": 1}
    week.lines |= {"core/dns": 0, "core/auth": 0}
    week.go(24)
    assert week.counts == {"addition": 2}
    del week.lines["core/dns"]
    week.go(24)
    assert week.counts == {"addition": 2}
    week.lines["core/dns"] = 7_300
    week.go(12)
    assert week.counts == {"addition": 2}
    week.shifted = True
    week.go(24)
    assert week.counts == {"addition": 2, "drift": 1}
    week.rate = 1_000
    week.go(12)
    assert week.counts["volume"] == 3  # 72 ticks of 4,000 lines, and what had come since the drift
    week.rate = 10
    week.go(48)
    assert week.counts == {"addition": 2, "drift": 1, "volume": 3}


def test_a_stream_that_moves_all_the_time_is_learnt_ever_less_often_and_at_least_every_two_days() -> None:
    """A job that runs by the hour must not train a model by the hour, however each training ends."""
    for outcome in (AttemptOutcome.CANDIDATE, AttemptOutcome.COMPLETED):
        week = Week(replace(RULES, age_s=90 * 86_400)).go(24)
        week.outcomes = [outcome] * 99
        for _ in range(20 * 24):
            week.shifted = True
            week.go(1)
        pauses = [(b - a) / HOUR for a, b in pairwise(week.began[1:])]
        assert 10 <= len(pauses) <= 16
        assert all(b >= 1.6 * a or b >= 48 for a, b in pairwise(pauses)) and max(pauses) < 50
        week.shifted = False
        week.go(5 * 24)
        week.shifted = True
        assert week.go(1).history.rest >= HOUR
        assert week.go(24).history.vain <= 5, "a stream that was quiet for long begins anew"


def test_a_training_that_was_called_off_is_not_asked_for_again() -> None:
    week = Week(replace(RULES, age_s=30 * 86_400))
    week.outcomes = [AttemptOutcome.CANCELLED]
    assert week.go(7 * 24).counts == {"addition": 1}


def test_a_trainer_that_dies_three_times_is_tried_a_fourth() -> None:
    week = Week(replace(RULES, age_s=30 * 86_400))
    week.outcomes = [AttemptOutcome.FAILED] * 3
    assert week.go(7 * 24).counts == {"addition": 4}
    assert week.live is not None


def test_a_daily_training_is_made_daily_and_a_missed_one_caught_up_once() -> None:
    week = Week(replace(RULES, age_s=30 * 86_400))
    week.daily = 2
    week.go(3 * 24)
    assert week.counts == {"addition": 1, "schedule": 3}
    week.go(2.5 * 24, controller=False)  # three times of day go by
    week.go(1)
    assert week.counts == {"addition": 1, "schedule": 4}
    week.go(24)
    assert week.counts == {"addition": 1, "schedule": 5}


def test_a_training_of_some_workloads_says_nothing_about_the_lines_of_the_others() -> None:
    at = datetime(2026, 11, 20, tzinfo=UTC)
    both = History().after(
        Attempt(at=at, outcome=AttemptOutcome.COMPLETED, causes=(), lines={"a": 10, "b": 20})
    )
    one = both.after(Attempt(at=at, outcome=AttemptOutcome.CANDIDATE, causes=(), lines={"a": 15}))
    assert one.last is not None and one.last.lines == {"a": 15, "b": 20}


def test_times_that_a_wrong_clock_left_in_the_future_count_as_now() -> None:
    now = datetime(2026, 11, 20, tzinfo=UTC)
    later = now + timedelta(days=365)
    history = History().after(Attempt(at=later, outcome=AttemptOutcome.COMPLETED, causes=(), lines={}))
    history = history.after(Attempt(at=later, outcome=AttemptOutcome.FAILED, causes=(), lines={}, reason="x"))
    mended = history.not_after(now)
    assert mended.last is not None and (mended.last.at, mended.failed_at) == (now, now)
    assert mended.not_after(later) == mended
