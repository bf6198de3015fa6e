"""The rules of workloads (sources/protocols/rules.py) of a process. They change with their file."""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import BadSetting
from pipeline.logs import logger
from pipeline.sources.protocols.rules import WorkloadRules, read_rules

_Stamp = tuple[int, int, int] | None


@dataclass(slots=True)
class RuleBook:
    """`path`: of the file, None for no rules. Raises BadSetting for one that is wrong at the beginning."""

    path: Path | None = None
    rules: WorkloadRules = field(init=False)
    _seen: _Stamp = field(init=False)

    def __post_init__(self) -> None:
        self._seen = self._stamp()
        self.rules = read_rules(self.path)

    def refresh(self) -> None:
        """Reads a file that has changed. The rules stay while their file is wrong, and the log says why."""
        if self.path is None or (stamp := self._stamp()) == self._seen:
            return
        self._seen = stamp
        try:
            self.rules = read_rules(self.path)
        except BadSetting as exc:
            logger().error("intake.rules_refused", why=str(exc), rules=len(self.rules.rules))
        else:
            logger().info("intake.rules_read", file=str(self.path), rules=len(self.rules.rules))

    def _stamp(self) -> _Stamp:
        """Of the content: an editor writes another file and renames it."""
        try:
            stat = self.path.stat() if self.path else None
        except OSError:
            return None
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat else None
