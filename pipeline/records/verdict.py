"""The verdict about a masked line, its reasons, and its wire form in the verdict cache."""

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from pipeline.errors import BadPayload
from pipeline.records.wire import Codec

UNCLASSIFIED: Final = 0  # the template id of lines past their workload's limit; real ids begin at 1
OURS: Final = "logweir:"  # begins the source of stored rows that were no line: findings in sessions and rates


class Reason(StrEnum):
    """Why a line is worth reading. On the wire a reason is `name` or `name:data`."""

    NEW_TEMPLATE = "new-template"  # no line of this shape in the training data
    UNLIKELY_TOKENS = "unlikely-tokens"  # data: the words, most surprising first, space separated
    RARE = "rare"  # data: "count/total" in the training data
    ERROR_SEVERITY = "error-severity"  # data: the level or the word that says so
    NEVER_SAID = "never-said"  # a calm sentence unlike all of the training data; data: "total usual-word"
    WARMING = "warming"  # no model yet: neither normal nor anomalous
    MARKED = "marked"  # by a person; data: "normal by NAME" or "anomalous by NAME"
    UNCLASSIFIED = "unclassified"  # past the template limit of its workload
    # Of a session, not of a line (watching/sessions/model.py); data begins with the template id.
    SESSION_EVENT = "session-event"  # an event that no normal session has
    SESSION_COUNTS = "session-counts"  # data: "id here/usual"
    SESSION_ORDER = "session-order"  # data: "id after id", "id first" or "id last"
    SESSION_MISSING = "session-missing"  # data: "id after id ms n/of", with " late ms" if it came
    RATE_BURST = "rate-burst"  # a template, or the workload, came far oftener than its past expects
    RATE_SILENCE = "rate-silence"  # a steady event stopped
    RATE_MIX = "rate-mix"  # the lines divide otherwise over the templates
    NUMBER_SHIFT = "number-shift"  # the values of a variable of a template are other ones than before
    NUMBER_OUTLIER = "number-outlier"  # one of them lies far above all others


def reason(name: Reason, data: str = "") -> str:
    """A reason as it is stored: `name` or `name:data`."""
    return f"{name.value}:{data}" if data else name.value


class Verdict(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The answer for one masked line under one model version.

    `template_id` is None where no template covers the line and none is made, as in an export.
    `score` is 0..1, higher is more anomalous; None, with `anomalous` None, while warming. `p_value`, in (0,
    1], is the share of normal unseen templates that would score at least as high; None without a measurement.
    """

    template_id: int | None
    score: float | None
    anomalous: bool | None
    reasons: tuple[str, ...]
    p_value: float | None = None

    def pack(self) -> bytes:
        """msgpack of version and fields."""
        return _CODEC.pack(self)

    @classmethod
    def unpack(cls, blob: bytes) -> "Verdict":
        """The inverse of `pack`. Raises BadPayload, also for a newer version: a cache miss costs little."""
        return _CODEC.unpack(blob)


_CODEC: Final = Codec(Verdict, version=1, what="a cached verdict", newer=BadPayload)


def pattern_ids(masked: Sequence[str]) -> list[int]:
    """The 64-bit `pattern_id` of each masked line; stable across machines and versions."""
    return [int.from_bytes(hashlib.blake2b(m.encode(), digest_size=8).digest(), "little") for m in masked]
