"""Which devices of this machine have an MPS daemon, and how many processes run under it.

A daemon that hangs must not hold the agent's beat, so each look runs in a thread of its own, one at a time.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from pipeline.gpu.node.mps import DEFAULT_DIRECTORY, PATHS, clients, find
from pipeline.gpu.values import MpsUse
from pipeline.logs import logger
from pipeline.upkeep import start_thread

LOOK_S: Final = 5.0  # between two looks: each asks a daemon by two processes
OLD_S: Final = 30.0  # a look that hangs says nothing for longer


class MpsWatch:
    """One per agent. One thread calls."""

    def __init__(
        self,
        *,
        path: str = PATHS,
        root: Path = DEFAULT_DIRECTORY,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path`: where the control program is looked for; `root`: as in mps.find."""
        self.path, self.root = path, root
        self._monotonic = monotonic
        self._look: threading.Thread | None = None
        self._began_s = float("-inf")
        self._found: tuple[float, Mapping[str, MpsUse]] = (float("-inf"), {})

    def look(self, uuids: Collection[str]) -> Mapping[str, MpsUse]:
        """The daemons by device as they were seen last; begins a new look where that was a while ago."""
        now = self._monotonic()
        running = self._look is not None and self._look.is_alive()
        if not running and now - self._began_s >= LOOK_S:
            self._began_s = now
            self._look = start_thread("mps", self._ask_all, tuple(uuids), now)
        seen_s, found = self._found
        return found if now - seen_s < OLD_S else {}

    def _ask_all(self, uuids: Collection[str], now: float) -> None:
        try:
            found = {}
            for uuid in uuids:
                daemon = find(uuid, path=self.path, root=self.root)
                if daemon is not None:
                    listed = clients(daemon)
                    count = None if listed is None else len(listed)
                    found[uuid] = MpsUse(own=bool(daemon.uuid), clients=count)
            self._found = now, found
        except Exception:  # noqa: BLE001 - the edge of a thread; the column stays empty
            logger().exception("agent.mps_look_failed")
