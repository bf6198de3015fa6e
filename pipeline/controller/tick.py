"""The controller: gathers facts, decides, asks for trainings, writes down what it decided and why.

One tick decides for every model: the shared one and those of workloads that have their own. Deciding twice
is harmless (equal requests are merged, and a queued training makes the next decision wait); a lease makes it
rare.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

import redis

from pipeline.controller.decide import Decision, Retrain, Wait, decide, to_json
from pipeline.controller.drift import WINDOW_LINES, WINDOWS, Drift, advance
from pipeline.controller.facts import Attempt, AttemptOutcome, Facts, History, RetrainRules, facts_to_json
from pipeline.controller.schedule import last_time_of_day, next_time_of_day
from pipeline.controller.training_status import Status, TrainingState
from pipeline.controller.trainings import TrainingRequest, Trainings, query_of
from pipeline.controller.watchlist import Watched, Watchlist, model_of, unmatched
from pipeline.errors import BadBundle, BadInput, BadPayload, TrainingsFull
from pipeline.ledger.ledger import Ledger
from pipeline.logs import logger
from pipeline.models.registry import Registry
from pipeline.records.versions import Live
from pipeline.records.wire import Codec
from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import SHARED, Keys
from pipeline.settings import Settings

KEEP: Final = 1_000  # decisions
WINDOW: Final = "window"  # beside the sums of a version, in the same hash
SAME_S: Final = 3_600.0  # an unchanged decision is written down again after so long

_OUTCOMES: Final = {
    TrainingState.FAILED: AttemptOutcome.FAILED,
    TrainingState.CANCELLED: AttemptOutcome.CANCELLED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """State of the controller about one model between ticks."""

    history: History = field(default_factory=History)
    counted: int = 0  # trainings that ended up to this number are in the history
    rolled_back_ms: int = 0
    recorded: tuple[str, float] = ("", 0.0)  # the decision in the list in a word, and when it was written (s)


MEMORIES: Final = Codec(Memory, version=1, what="the controller's memory", newer=BadPayload)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """Inputs that a tick reads once for all models."""

    now: datetime
    watched: Watched
    stored: Mapping[str, int]  # lines, by workload
    busy: frozenset[str]  # models of which a training waits or runs
    ended: list[tuple[int, Status]]  # the latest trainings that ended, with their numbers


class Controller:
    """One per process that may tick."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.keys = Keys(settings.redis.key_prefix)
        self.ledger = Ledger(client, settings)
        self.registry = Registry(client, settings)
        self.trainings = Trainings(client, settings)
        self.watchlist = Watchlist(client, settings)
        self.rules = RetrainRules.of_settings(settings)
        self._learnt: dict[str, frozenset[str]] = {}

    def tick(self) -> list[str]:
        """Decide for every model once; returns the ids of the trainings that were asked for."""
        totals = self.ledger.backlog.totals()
        inputs = _Inputs(
            now=datetime.fromtimestamp(self.ledger.store.now_ms() / 1000, UTC),
            watched=self.watchlist.look(),
            stored={name: t.get("stored", 0) for name, t in totals.items()},
            busy=frozenset(s.model for s in self.trainings.active()),
            ended=self.trainings.ended_after(0),
        )
        requested = []
        models = self._models(inputs)
        self._forget_others(models)
        for model, workloads in models.items():
            facts, memory = self._facts(inputs, model, workloads)
            decision = decide(facts, self.rules)
            if isinstance(decision, Retrain):
                try:
                    request_id, new = self.trainings.request(self._request(decision, facts))
                except (BadInput, TrainingsFull) as exc:  # a later tick decides the same
                    decision = Wait(until=None, why=str(exc), kind="refused")
                else:
                    requested += [request_id] * new
            self._record(facts, decision, memory)
        return requested

    def _models(self, inputs: "_Inputs") -> dict[str, dict[str, int]]:
        """Each model with the watched workloads that it learns from, and their stored lines."""
        found: dict[str, dict[str, int]] = {SHARED: {}}
        for name, lines in inputs.stored.items():
            if inputs.watched.covers(name):
                found.setdefault(model_of(name, self.settings.train.own_models), {})[name] = lines
        return found

    def _facts(self, inputs: "_Inputs", model: str, workloads: dict[str, int]) -> tuple[Facts, Memory]:
        times, zone = self.settings.train.retrain_at, self.settings.intake.zone
        live = self.registry.current(model)
        memory = self._remembered(model)
        memory = replace(memory, history=memory.history.not_after(inputs.now))
        memory = _with_ended(memory, [e for e in inputs.ended if e[1].model == model], live, workloads)
        facts = Facts(
            now=inputs.now,
            model=model,
            watching=bool(inputs.watched.entries),
            workloads=workloads,
            silent=tuple(unmatched(inputs.watched.patterns, inputs.stored)) if model == SHARED else (),
            trained=frozenset() if live is None else self._trained(live.version),
            outdated=live is not None and self.registry.is_older(live.version),
            live_since=None if live is None else datetime.fromtimestamp(live.published_ms / 1000, UTC),
            history=memory.history,
            busy=model in inputs.busy,
            drift=self._drift(live, inputs.now),
            scheduled=last_time_of_day(inputs.now, times, zone),
            scheduled_next=next_time_of_day(inputs.now, times, zone),
        )
        return facts, memory

    def _request(self, decision: Retrain, facts: Facts) -> TrainingRequest:
        return TrainingRequest(
            model=facts.model,
            query=query_of(self.settings, facts.now),
            asked_by="controller",
            why=decision.reason,
            answers=decision.causes,
        )

    def _trained(self, version: str) -> frozenset[str]:
        """Workloads of a version's training; versions are immutable, so they are read once."""
        if version not in self._learnt:
            try:
                workloads = frozenset(self.registry.manifest(version).workloads)
            except BadBundle:
                return frozenset()  # status shows the fault; the history still knows what was learnt
            self._learnt = {version: workloads, **dict(list(self._learnt.items())[:50])}
        return self._learnt[version]

    def _drift(self, live: Live | None, now: datetime) -> Drift | None:
        """Advance the drift window of the live version, which lies beside its sums."""
        if live is None:
            return None
        key = self.keys.drift(live.version)
        with answering():
            raw = text_map(self.client.hgetall(key))
        text = raw.pop(WINDOW, None)
        try:
            window = None if text is None else WINDOWS.from_json(text)
            window, drift = advance(
                window, version=live.version, counters=raw, drift_lines=WINDOW_LINES, now=now
            )
        except (ValueError, BadPayload) as exc:
            logger().warning("controller.drift_lost", why=repr(exc))
            with answering():
                self.client.hdel(key, WINDOW)  # the next look begins a window anew
            return None
        if raw:  # nothing is kept of a version that has answered no line yet
            with answering():
                self.client.hset(key, WINDOW, WINDOWS.to_json(window))
        return drift

    def _remembered(self, model: str) -> Memory:
        with answering():
            raw = self.client.hget(self.keys.controller, f"memory:{model}")
        try:
            return Memory() if raw is None else MEMORIES.from_json(raw)
        except BadPayload as exc:  # at worst one training is made that was not needed
            logger().warning("controller.memory_lost", why=repr(exc))
            return Memory()

    def _record(self, facts: Facts, decision: Decision, memory: Memory) -> None:
        """The newest decision of every model; in the list those that differ from the one before."""
        model, at = facts.model, facts.now.isoformat()
        entry = json.dumps({"at": at, "model": model, **to_json(decision), "facts": facts_to_json(facts)})
        kind = decision.kind if isinstance(decision, Wait) else ",".join(decision.causes)
        last, since = memory.recorded
        changed = kind != last or abs(facts.now.timestamp() - since) > SAME_S
        if changed:
            memory = replace(memory, recorded=(kind, facts.now.timestamp()))
        pipe = self.client.pipeline(transaction=True)
        pipe.hset(self.keys.controller, f"memory:{model}", MEMORIES.to_json(memory))
        pipe.hset(self.keys.controller, f"decision:{model}", entry)
        if isinstance(decision, Retrain):
            pipe.hset(self.keys.controller, f"retrain:{model}", entry)
        if changed:
            pipe.lpush(self.keys.decisions, entry)
            pipe.ltrim(self.keys.decisions, 0, KEEP - 1)
        with answering():
            pipe.execute()

    def _forget_others(self, models: Mapping[str, object]) -> None:
        """Decisions about models that nothing watched belongs to any more; what they did is kept."""
        with answering():
            names = text_map(self.client.hgetall(self.keys.controller))
            obsolete = [n for n in names if n.startswith("decision:") and n.partition(":")[2] not in models]
            if obsolete:
                self.client.hdel(self.keys.controller, *obsolete)


def decisions(client: "redis.Redis", keys: Keys, kind: str = "decision") -> dict[str, dict[str, Any]]:
    """The newest decision for each model, with its inputs; `kind` "retrain": the newest with a request."""
    with answering():
        raw = text_map(client.hgetall(keys.controller))
    found = {}
    for name, text in sorted(raw.items()):
        found_kind, _, model = name.partition(":")
        if found_kind == kind:
            with suppress(ValueError, TypeError):  # one that cannot be read is not shown
                found[model] = dict(json.loads(text))
    return found


def _with_ended(
    memory: Memory, trainings: list[tuple[int, Status]], live: Live | None, workloads: Mapping[str, int]
) -> Memory:
    """The memory with the trainings that ended since, and a version that was rolled back since.

    One that was cancelled before it began has counted no lines. The controller's own has answered its causes
    for all `workloads` all the same, or it would be asked for again at once; an operator's was no attempt.
    """
    history, counted = memory.history, memory.counted
    for number, status in trainings:
        if number <= memory.counted:
            continue
        counted = max(counted, number)
        outcome = _OUTCOMES.get(
            status.state, AttemptOutcome.COMPLETED if status.published else AttemptOutcome.CANDIDATE
        )
        lines = dict(status.stored)
        if outcome is AttemptOutcome.CANCELLED and not lines:
            if status.asked_by != "controller":
                continue
            lines = dict(workloads)
        history = history.after(
            Attempt(
                at=datetime.fromtimestamp(status.ended_ms / 1000, UTC),
                outcome=outcome,
                causes=status.answers,
                lines=lines,
                reason=status.reason,
            )
        )
    rolled_back = memory.rolled_back_ms
    if live is not None and live.how == "rolled-back" and live.published_ms > rolled_back:
        rolled_back = live.published_ms
        at = datetime.fromtimestamp(live.published_ms / 1000, UTC)
        history = history.after(Attempt(at=at, outcome=AttemptOutcome.ROLLED_BACK, causes=(), lines={}))
    return replace(memory, history=history, counted=counted, rolled_back_ms=rolled_back)
