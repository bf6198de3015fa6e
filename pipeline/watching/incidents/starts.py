"""Starts of a workload: new calm patterns soon after one belong to a new version, and are one cause.

A start is a line whose template says so (`started`, `listening on`), and that did not come for a while: jobs
that start all day say nothing. A program that starts without a word is not seen.
"""

import re
from typing import Annotated, Final

import msgspec

NEW_VERSION: Final = "new-version"  # cause and kind of new calm patterns after a start
MOST: Final = 32  # templates of starts of a workload
_SEEN_AFTER_MS: Final = 1_800_000  # new patterns of a version show within half an hour, as a rule
_QUIET_MS: Final = 1_800_000  # without the line before one that counts as a start
_STEP_MS: Final = 300_000  # a line that comes all the time is noted so often
_SAYS: Final = re.compile(
    r"(?i)\b(?:start(?:ed|ing)|start-?up|listening (?:on|at|for)|ready (?:to accept|for) connections|boot(?:ed|ing))\b"
)

_Ms = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


def says_start(text: str) -> bool:
    """Whether a template's text is that of a program that starts."""
    return _SAYS.search(text) is not None


class Starts(msgspec.Struct, array_like=True):
    """Of one workload: when each template of a start was seen last, and the newest start. Times are event
    time."""

    last: Annotated[dict[int, _Ms], msgspec.Meta(max_length=MOST)] = msgspec.field(default_factory=dict)
    newest_ms: _Ms = 0  # 0: none

    def note(self, template_id: int, at_ms: int) -> bool:
        """A line of a start was seen; whether that changed anything."""
        before = self.last.get(template_id)
        if before is not None and at_ms - before < _STEP_MS:
            return False
        if before is None or at_ms - before >= _QUIET_MS:
            self.newest_ms = max(self.newest_ms, at_ms)
        self.last[template_id] = at_ms
        if len(self.last) > MOST:
            del self.last[min(self.last, key=lambda one: self.last[one])]
        return True

    def just_before(self, at_ms: int) -> bool:
        """Whether the workload started not long before."""
        return self.newest_ms > 0 and 0 <= at_ms - self.newest_ms <= _SEEN_AFTER_MS
