"""Values about what runs now. They need no package beside those of a plain installation."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHealth:
    """One worker, and what is wrong with it; `why` is "" when it is well."""

    name: str
    role: str
    pid: int
    silent_s: float
    quiet_s: float | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineHealth:
    """The workers that were asked for. `why`: a sentence about those that are missing or unwell, "" while all
    is well."""

    ok: bool
    why: str
    workers: list[WorkerHealth]
