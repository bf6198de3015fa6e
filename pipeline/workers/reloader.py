"""Makes a process serve a new model version before its next batch needs it, and says so.

A thread per worker process. It compares the live pointers every `reload_poll_ms`, or at once when the broadcast hint
arrives; reads the new version beside the work that goes on under the old one; then the next batch begins under the new
one, and `logweir status` shows it. Missing a hint costs one poll.
"""

import threading

import redis

from pipeline import metrics
from pipeline.errors import BadPayload, ModelUnavailable, RedisUnavailable
from pipeline.keyspace import connect
from pipeline.observe import logger
from pipeline.presence import Presence
from pipeline.registry import Registry
from pipeline.tasks.context import Context
from pipeline.tasks.reload import HINT

CONFIRM_S = 15.0  # said again so often: a Redis that came back empty learns it too


class Reloader(threading.Thread):
    """Started in the process that does the work: the worker itself, or its prefork child. It ends with the process."""

    def __init__(self, context: Context, name: str) -> None:
        super().__init__(name="reloader", daemon=True)
        self.context = context
        self.worker = name
        # Connections of its own: the work's may be in a long call.
        client = connect(context.settings)
        self.presence = Presence(client, context.settings)
        self.registry = Registry(client, context.settings)
        self.said: dict[str, str] = {}
        self.quiet_s = 0.0

    def run(self) -> None:
        if self.context.loads == "network":
            # torch takes seconds to import; the first model, or a restart, must not wait for it.
            from pipeline.models import line  # noqa: F401
        poll_s = self.context.settings.reload_poll_ms / 1000
        while True:
            HINT.wait(poll_s)
            HINT.clear()
            self.quiet_s += poll_s
            try:
                self.look()
            except (RedisUnavailable, redis.RedisError, BadPayload):
                continue  # the worker itself says what is wrong; comparing goes on
            except Exception:  # noqa: BLE001 - the edge of a loop that must not end
                logger().exception(
                    "reloader.failed"
                )  # a thread that died would leave the old version for ever

    def look(self) -> None:
        """Compare once, and say what is served when it changed."""
        serving = self.context.serving
        lives, faults = self.registry.live(), self.registry.faults()
        for live in lives:
            try:
                serving.follow(live, faults)
            except ModelUnavailable as exc:
                self.presence.complain("model", str(exc))
        versions = serving.versions()
        if versions != self.said or (versions and self.quiet_s > CONFIRM_S):
            self.presence.serves(self.worker, versions)
            if versions != self.said:
                metrics.reloaded()
            self.said, self.quiet_s = versions, 0.0
