"""What a unit may be: the columns of results that name one."""

from typing import Final, Literal

UnitKind = Literal["host", "pod", "process", "service", "session", "source", "workload"]

# A session has no column: its key stands in the text of its records.
UNIT_COLUMNS: Final[dict[UnitKind, str | None]] = {
    "host": "host",
    "pod": "host",  # where shippers of Kubernetes write the name of a pod
    "process": "process",
    "service": "service",
    "session": None,
    "source": "source",
    "workload": "workload",
}
