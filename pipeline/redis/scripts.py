"""Runs Lua scripts by name: `lua/<room>/<verb>.lua`, where needed until replicas have the outcome."""

import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import redis

from pipeline.errors import RedisUnavailable
from pipeline.redis.connection import answering, drop_idle, replaced, replica_count

SCRIPT_DIR: Final = Path(__file__).with_name("lua")
ACK_MS: Final = 200  # Replicas of one place acknowledge within a few.
ALL_MS: Final = 10  # The slower replicas get so long. Without them the sentinels are asked.
# A server looks at the time of WAIT ten times a second, so a replica that is away is waited for this seldom.
AWAY_S: Final = 5.0
MARK_S: Final = 60
# Files that scripts share beside the prelude, by how their names begin.
_SHARED: Final = {
    "gpu/": ("gpu/_gpu",),
    "ledger/accept": ("ledger/_entry", "ledger/_accept"),
    "ledger/bisect": ("ledger/_entry",),
    "ledger/separate": ("ledger/_entry",),
}


@cache
def script_files() -> Mapping[str, str]:
    """The sources of all files below `lua/` by name. They are read at once, because a process without a free
    file must still give back what it has claimed. Raises OSError."""
    return {
        path.relative_to(SCRIPT_DIR).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in SCRIPT_DIR.rglob("*.lua")
    }


@cache
def script_text(name: str) -> str:
    """The source of `lua/<name>.lua`, with the preludes that it shares with others in front."""
    shared = next((part for begin, part in _SHARED.items() if name.startswith(begin)), ())
    return "".join(script_files()[part] for part in ("_prelude", *shared, name))


class Scripts:
    """Runs the Lua scripts of one Redis connection by name."""

    def __init__(self, client: "redis.Redis") -> None:
        self.client = client
        self._loaded: dict[str, Any] = {}
        self._one_away = -AWAY_S  # monotonic: when not all replicas acknowledged

    def run(self, name: str, keys: list[str], args: list[Any]) -> Any:
        """Raises RedisUnavailable when Redis does not answer or refuses the write."""
        script = self._loaded.get(name)
        if script is None:
            script = self._loaded[name] = self.client.register_script(script_text(name))
        with answering():
            return script(keys=keys, args=args)

    def run_acknowledged(
        self, name: str, keys: list[str], args: list[Any], *, replicas: int, mark: str
    ) -> Any:
        """As `run`, and then waits in the same round trip until so many replicas have the outcome.

        Raises RedisUnavailable when fewer acknowledge: the outcome stands, unless the master is lost. The
        script has to be idempotent, because the caller runs it again. `mark`: the key that is written last.
        """
        if not replicas:
            return self.run(name, keys, args)
        # WAIT asks for the last write of its own connection. A script that finds its work done writes
        # nothing, and WAIT would count replicas that lack what another connection wrote.
        mark_it, wait = ("SET", mark, "1", "EX", str(MARK_S)), ("WAIT", str(replicas), str(ACK_MS))
        with answering():
            everyone = replica_count(self.client)
        if everyone <= replicas:
            answer, _, count = self.run_all([(name, keys, args)], mark_it, wait)
            self._counted(int(count), replicas)
            return answer
        # For the slower replicas too, unless one of them was away a moment ago.
        some_away = time.monotonic() - self._one_away < AWAY_S
        everybody = ("WAIT", "0" if some_away else str(everyone), str(ALL_MS))
        answer, _, count, total, server = self.run_all(
            [(name, keys, args)], mark_it, wait, everybody, ("INFO", "server")
        )
        self._counted(int(count), replicas)
        if int(total) < everyone:
            if not some_away:
                self._one_away = time.monotonic()
            # Some replicas have the outcome and some not. A living master is replaced by one of either kind.
            if why := replaced(self.client, str(server["run_id"])):
                drop_idle()
                raise RedisUnavailable(f"this master may be replaced ({why}); it has to be repeated")
        return answer

    def _counted(self, count: int, wanted: int) -> None:
        if count < wanted:
            drop_idle()  # this may be a master that was replaced
            raise RedisUnavailable(
                f"only {count} of {wanted} replicas have acknowledged within {ACK_MS} ms; it has to be "
                "repeated"
            )

    def run_all(
        self,
        calls: Sequence[tuple[str, list[str], list[Any]]],
        *commands: tuple[str, ...],
        at_once: bool = False,
    ) -> list[Any]:
        """Scripts and then plain commands in one round trip, `at_once` with nobody between; their answers in
        order.

        Only for scripts that may run twice: where Redis has forgotten one, all are sent again. Raises as
        `run` does."""
        shas = [self.client.register_script(script_text(name)).sha for name, _, _ in calls]

        def ask() -> list[Any]:
            pipe = self.client.pipeline(transaction=at_once)
            for sha, (_, keys, args) in zip(shas, calls, strict=True):
                pipe.evalsha(sha, len(keys), *keys, *args)
            for command in commands:
                pipe.execute_command(*command)  # type: ignore[no-untyped-call]
            return list(pipe.execute())

        with answering():
            try:
                return ask()
            except redis.exceptions.NoScriptError:
                for name, _, _ in calls:
                    self.client.script_load(script_text(name))
                return ask()
