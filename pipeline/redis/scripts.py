"""Runs Lua scripts by name: `lua/<room>/<verb>.lua`."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import redis

from pipeline.redis.connection import answering

SCRIPT_DIR: Final = Path(__file__).with_name("lua")


@cache
def script_text(name: str) -> str:
    """The source of `lua/<name>.lua`, with the preludes that it shares with others in front."""
    shared = ["_prelude", "gpu/_gpu"] if name.startswith("gpu/") else ["_prelude"]
    return "".join((SCRIPT_DIR / f"{part}.lua").read_text(encoding="utf-8") for part in (*shared, name))


class Scripts:
    """Runs the Lua scripts of one Redis connection by name."""

    def __init__(self, client: "redis.Redis") -> None:
        self.client = client
        self._loaded: dict[str, Any] = {}

    def run(self, name: str, keys: list[str], args: list[Any]) -> Any:
        """Raises RedisUnavailable when Redis does not answer or refuses the write."""
        script = self._loaded.get(name)
        if script is None:
            script = self._loaded[name] = self.client.register_script(script_text(name))
        with answering():
            return script(keys=keys, args=args)

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
