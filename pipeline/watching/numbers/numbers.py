"""Numbers of one workload: the values of its templates' variables, and alarms about their distribution.

`step` takes the values of complete slots of time, in their order. Each variable compares its windows with
its past (variable.py). Whether a deviation is a finding is decided here: by how often one comes by chance
over all windows of the workload, and by what its past showed (numbers/scores.py). A shift is reported once
while it lasts, and once more when it has become unlikely enough for an alarm of the deployment.

Memory is bounded: MAX_VARIABLES, those seen longest ago leave first, and MAX_PACKED bytes. Values that come
late join the next window: a distribution does not need every value.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import msgspec

from pipeline.errors import BadPayload
from pipeline.records.verdict import Reason
from pipeline.records.wire import Codec
from pipeline.watching.numbers.alarms import EVERY_TEMPLATE, NumberAlarm, of_one_minute
from pipeline.watching.numbers.scores import BLOCK, FOUND_PER_DAY, NumberScores
from pipeline.watching.numbers.variable import HOUR, LASTING, SLOTS, Deviation, Name, Variable
from pipeline.watching.rates.detection import AlertBackoff, EpochMinute, Positive, Repeat, TemplateId
from pipeline.watching.values.typed import ValueKind

MAX_VARIABLES: Final = 256
MAX_NAMES: Final = 12  # of one template; more are keys that are names themselves
MAX_PACKED: Final = 640 << 10
_WILD: Final = 2.25  # mean squared deviation of a median: a factor of 4.5. So jumps an id, not a quantity.
_WILD_WINDOWS: Final = 24
_TESTS: Final = 2.0  # of a window: two quantiles
_CALM: Final = 3  # windows that end an episode
_POOLED: Final = (ValueKind.DURATION, ValueKind.TIME, ValueKind.STATUS)

# (slot, template, name, kind), and the counts by bin
ValueCounts = Iterable[tuple[tuple[int, int, str, str], Mapping[int, int]]]


class _Packed(msgspec.Struct, array_like=True, frozen=True):
    """The wire form of Numbers."""

    variables: Annotated[list[Variable], msgspec.Meta(max_length=MAX_VARIABLES)]
    scores: tuple[NumberScores, NumberScores]
    causes: Annotated[dict[Annotated[str, msgspec.Meta(max_length=96)], Repeat], msgspec.Meta(max_length=512)]
    since: EpochMinute
    minute: EpochMinute
    windows: Positive
    values: Positive
    without: Positive
    wild: Annotated[list[tuple[TemplateId, Name]], msgspec.Meta(max_length=MAX_VARIABLES)]


_CODEC: Final = Codec(_Packed, version=1, what="a state of numbers", newer=BadPayload)
_KINDS: Final = (Reason.NUMBER_SHIFT, Reason.NUMBER_OUTLIER)


class Numbers:
    """State of one workload. Not thread-safe.

    `without`: values that had no place, because their workload or template has too many variables. `wild`:
    variables that jump as ids do; they are not followed."""

    def __init__(self) -> None:
        self.variables: dict[tuple[int, str, ValueKind], Variable] = {}
        self.scores = {kind: NumberScores(FOUND_PER_DAY[kind]) for kind in _KINDS}
        self.backoff = AlertBackoff()
        self.since = self.minute = 0
        self.windows = self.values = 0.0
        self.without = 0.0
        self.wild: dict[tuple[int, str], None] = {}
        self._first: dict[str, int] = {}  # a template that has a variable of this name
        self._at = 0  # the minute of the values at hand
        self._alarm_per_day = math.inf

    def step(
        self, counts: ValueCounts, *, judged: bool, alarm_per_day: float = math.inf
    ) -> list[NumberAlarm]:
        """Judge (`judged`) and learn the values of complete minutes, in this order. `alarm_per_day`: a shift
        that comes more often by chance is reported again when it has become less likely."""
        self._alarm_per_day = alarm_per_day
        alarms, found = list[NumberAlarm](), list[NumberAlarm]()
        minute = -1
        for (slot, template_id, name, kind), values in counts:
            if slot // SLOTS != minute:
                alarms += of_one_minute(found)
                found, minute = [], slot // SLOTS
                self._turn(minute)
            variable = self._variable(slot, template_id, name, ValueKind(kind))
            if variable is None:
                self.without += sum(values.values())
                continue
            if variable.take(slot, values):
                found += self._close(variable, minute, judged=judged)
            pooled = self._pooled(slot, variable)
            if pooled is not None and pooled.take(slot, values):
                found += self._close(pooled, minute, judged=judged)
        return alarms + of_one_minute(found)

    def _pooled(self, slot: int, variable: Variable) -> Variable | None:
        """The variable of all templates together, where several have one of this name: a template of few
        lines has a window too seldom."""
        if variable.kind not in _POOLED:
            return None
        first = self._first.setdefault(variable.name, variable.template_id)
        if (
            first == variable.template_id
            and (EVERY_TEMPLATE, variable.name, variable.kind) not in self.variables
        ):
            return None
        return self._variable(slot, EVERY_TEMPLATE, variable.name, variable.kind)

    def _told_by_templates(self, pooled: Variable) -> bool:
        """Whether a shift of one of its templates that goes on was reported."""
        return any(
            one.episode
            and one.level
            and (one.name, one.kind) == (pooled.name, pooled.kind)
            and one is not pooled
            for one in self.variables.values()
        )

    def _turn(self, minute: int) -> None:
        self.since, self._at = self.since or max(1, minute), minute
        if minute // BLOCK != self.minute // BLOCK:
            for scores in self.scores.values():
                scores.turn(minute)
        self.minute = max(self.minute, minute)

    def _variable(self, slot: int, template_id: int, name: str, kind: ValueKind) -> Variable | None:
        # One key may write values of several kinds, such as `status=0` and `status=503`.
        key = (template_id, name, kind)
        variable = self.variables.get(key)
        if variable is not None:
            return variable
        if kind is ValueKind.COUNT and (template_id, name) in self.wild:
            return None
        if len(self.variables) >= MAX_VARIABLES and not self._make_room(slot):
            return None
        if sum(known == template_id for known, _, _ in self.variables) >= MAX_NAMES:
            return None
        variable = Variable(template_id=template_id, name=name, kind=kind, since=slot, seen=slot)
        self.variables[key] = variable
        return variable

    def _make_room(self, slot: int) -> bool:
        """Forget the variable that was seen longest ago, if that is an hour ago."""
        key = min(self.variables, key=lambda key: (self.variables[key].seen, key))
        if slot - self.variables[key].seen < HOUR:
            return False
        del self.variables[key]
        return True

    # ---- windows -----------------------------------------------------------------------------------

    def _close(self, variable: Variable, minute: int, *, judged: bool) -> list[NumberAlarm]:
        """Judge a window, and learn it unless its level is another one for now."""
        result = variable.judge()
        self.windows += 1.0
        self.values += result.n
        shift, score = result.shift, variable.cumulate(result.shift)
        chance = self._chance(Reason.NUMBER_SHIFT, variable, score)
        found: list[NumberAlarm] = []
        if variable.episode and minute - variable.episode > LASTING:
            self.backoff.ended(self._cause(Reason.NUMBER_SHIFT, variable), minute)
            variable.renew()
            variable.learn()
        elif shift is not None and (
            chance <= self.scores[Reason.NUMBER_SHIFT].per_day or (variable.episode and variable.score)
        ):
            if self._begins(variable, shift, score, chance, minute, judged=judged):
                found = [self._alarm(Reason.NUMBER_SHIFT, variable, shift._replace(nats=score), chance)]
                variable.kept_back = chance > self._alarm_per_day
            variable.calm = 0
            variable.drop_window()
        elif variable.episode:
            self._calms(variable, minute)
        else:
            self.scores[Reason.NUMBER_SHIFT].add(score)
            variable.learn()
            if result.outlier is not None and variable.template_id != EVERY_TEMPLATE:
                found = self._far_outside(variable, result.outlier, minute, judged=judged)
        self._drop_wild(variable)
        return found

    def _begins(
        self, variable: Variable, shift: Deviation, score: float, chance: float, minute: int, *, judged: bool
    ) -> bool:
        """Begin an episode, or a higher one, with this window; whether that is reported."""
        before = variable.level
        if variable.kept_back and chance <= self._alarm_per_day:
            return True
        if not variable.escalates(shift):
            return False
        variable.episode = variable.episode or max(1, minute)
        if not judged:
            self.scores[Reason.NUMBER_SHIFT].add(score)
            return False
        if variable.template_id == EVERY_TEMPLATE and self._told_by_templates(variable):
            return False
        if self._admit(Reason.NUMBER_SHIFT, variable, minute):
            return True
        variable.level = before  # It was not reported, so the next window asks again.
        return False

    def _calms(self, variable: Variable, minute: int) -> None:
        """A window like those before the episode, which ends with the third of them."""
        variable.calm += 1
        if variable.calm < _CALM:
            variable.drop_window()
            return
        variable.end_episode()
        self.backoff.ended(self._cause(Reason.NUMBER_SHIFT, variable), minute)
        variable.learn()

    def _far_outside(
        self, variable: Variable, outlier: Deviation, minute: int, *, judged: bool
    ) -> list[NumberAlarm]:
        kind = Reason.NUMBER_OUTLIER
        chance = self._chance(kind, variable, outlier.nats)
        if chance > self.scores[kind].per_day or not judged:
            self.scores[kind].add(outlier.nats)
            return []
        if not self._admit(kind, variable, minute):
            return []
        self.backoff.ended(self._cause(kind, variable), minute)
        return [self._alarm(kind, variable, outlier, chance)]

    @staticmethod
    def _cause(kind: Reason, variable: Variable) -> str:
        return f"{kind.value}:{variable.cause}"

    def _chance(self, kind: Reason, variable: Variable, score: float) -> float:
        """How often a day a score of this variable is as high by chance."""
        minutes = max(1, self.minute - self.since)
        tests = (_TESTS * self.windows if kind is Reason.NUMBER_SHIFT else self.values) / minutes * 1440
        repeats = self.backoff.repeats(self._cause(kind, variable), self.minute)
        if kind is Reason.NUMBER_SHIFT and variable.kept_back:
            repeats = max(0.0, repeats - 1.0)  # the finding of this episode
        return self.scores[kind].chance(score, tests, minutes, repeats)

    def _admit(self, kind: Reason, variable: Variable, minute: int) -> bool:
        """Whether this variable may alert now; if so, the alert counts."""
        admitted = self.backoff.admit(self._cause(kind, variable), minute)
        if admitted:
            self.scores[kind].found(minute)
        return admitted

    def _alarm(self, kind: Reason, variable: Variable, shown: Deviation, chance: float) -> NumberAlarm:
        return NumberAlarm(
            kind=kind,
            template_id=variable.template_id,
            name=variable.name,
            value_kind=variable.kind,
            shown=shown,
            minute=self._at,
            per_day=chance,
        )

    def _drop_wild(self, variable: Variable) -> None:
        if (
            variable.kind is ValueKind.COUNT
            and variable.windows >= _WILD_WINDOWS
            and variable.squares[0] > _WILD
            and len(self.wild) < MAX_VARIABLES
        ):
            del self.variables[variable.template_id, variable.name, variable.kind]
            self.wild[variable.template_id, variable.name] = None

    # ---- wire --------------------------------------------------------------------------------------

    def pack(self) -> bytes:
        """At most `MAX_PACKED` bytes: past them, the quarter of the variables that were seen longest ago
        leaves."""
        while True:
            blob = _CODEC.pack(self._packed())
            if len(blob) <= MAX_PACKED:
                return blob
            oldest = sorted(self.variables, key=lambda key: (self.variables[key].seen, key))
            for key in oldest[: max(1, len(oldest) // 4)]:
                del self.variables[key]

    def _packed(self) -> _Packed:
        shift, outlier = _KINDS
        return _Packed(
            variables=list(self.variables.values()),
            scores=(self.scores[shift], self.scores[outlier]),
            causes=self.backoff.causes,
            since=self.since,
            minute=self.minute,
            windows=self.windows,
            values=self.values,
            without=self.without,
            wild=list(self.wild),
        )

    @classmethod
    def unpack(cls, blob: bytes | None) -> "Numbers":
        """A new state for None. Raises BadPayload when the bytes are not one of `pack`."""
        state = cls()
        if blob is None:
            return state
        packed = _CODEC.unpack(blob)
        state.variables = {(one.template_id, one.name, one.kind): one for one in packed.variables}
        state.scores = dict(zip(_KINDS, packed.scores, strict=True))
        state._first = {one.name: one.template_id for one in reversed(packed.variables) if one.template_id}
        state.backoff.causes = packed.causes
        state.since, state.minute = packed.since, packed.minute
        state.windows, state.values, state.without = packed.windows, packed.values, packed.without
        state.wild = dict.fromkeys(packed.wild)
        return state
