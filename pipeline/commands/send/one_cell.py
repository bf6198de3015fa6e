"""One `logweir send` sends to one cell: cursors of its sources lie in the Redis of that cell."""

from collections.abc import Sequence

from pipeline.errors import BadInput
from pipeline.producer import Producer
from pipeline.redis.cells import cells_of, in_cell
from pipeline.settings import Settings


class OtherCell(BadInput):
    """Lines of another cell than the one that this command sends to."""


def one_cell(settings: Settings, workloads: Sequence[str]) -> Settings:
    """The settings of the cell that takes all these workloads. Raises OtherCell when there are several."""
    cells = cells_of(settings)
    if cells is None or not workloads:
        return settings
    found = {cells.url(workload): workload for workload in workloads}
    if len(found) > 1:
        one, other = list(found.values())[:2]
        raise OtherCell(f"the workloads {one} and {other} lie in different cells; send their files apart")
    return in_cell(settings, workloads[0])


def stay_in_cell(producer: Producer, settings: Settings, workload: str) -> str:
    """The workload. Raises OtherCell for one of another cell, which only a member of an archive brings."""
    cells = cells_of(settings)
    if cells is not None and cells.url(workload) != producer.settings.redis.url:
        raise OtherCell(
            f"the workload {workload} of an archive's member lies in another cell; unpack the archive, or "
            "send it with --workload"
        )
    return workload
