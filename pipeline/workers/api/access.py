"""Who may ask: every request has a key, of `logweir keys` or of the stack's own file.

A key with workloads sees only what is theirs, and nothing of the pipeline as a whole.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import redis
from fastapi import Request

from pipeline.errors import RedisUnavailable
from pipeline.service.keys import ADMIN, KeyRing, SenderKey, SenderKeys, authorization_texts, key_digest
from pipeline.settings.listeners import Listener
from pipeline.workers.api.problems import AskRefused
from pipeline.workers.sockets import is_own_host

LOCAL: Final = "local"  # the name of the stack's own key
REMEDY: Final = "; `logweir keys add NAME --scope read` makes one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who asks. `only`: patterns of the workloads that it sees; empty: all."""

    name: str
    key: SenderKey

    @property
    def only(self) -> tuple[str, ...]:
        return (self.key.workload,) if self.key.workload else self.key.patterns


@dataclass(slots=True, kw_only=True)
class Doorkeeper:
    """Reads keys; of many requests one asks Redis. `own`: the digest of the stack's own key, "" without."""

    keys: SenderKeys
    listener: Listener
    own: str = ""
    _reading: "asyncio.Task[KeyRing] | None" = field(default=None)

    async def admit(self, request: Request) -> Asker:
        """Who asks. Raises AskRefused."""
        texts = list(authorization_texts(request.headers.get("authorization", "")))
        if not texts and (other := request.headers.get("x-api-key")):
            texts = [other]
        if not texts:
            raise AskRefused(401, f"this needs a key, in the header `Authorization: Bearer KEY`{REMEDY}")
        if self.own and self.listener.loopback and self._is_own(texts):
            return Asker(name=LOCAL, key=_own_key(self.own))
        found = (await self._ring()).find(texts)
        if found is None:
            raise AskRefused(
                401, "the key is not known here or has expired; `logweir keys list` shows the others"
            )
        return Asker(name=found.name, key=found)

    def check_host(self, request: Request) -> None:
        """Web pages of other origins do not ask, and no public name leads to loopback. Raises AskRefused."""
        host = request.headers.get("host")
        if self.listener.loopback and not is_own_host(host, self.listener.host):
            raise AskRefused(421, f"this is not {str(host)[:100]!r}; ask {self.listener.address}")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != (host or "").lower():
            raise AskRefused(403, f"pages of {origin[:100]!r} may not ask this API; ask from its own host")

    def _is_own(self, texts: list[str]) -> bool:
        return any(hmac.compare_digest(key_digest(text), self.own) for text in texts)

    async def _ring(self) -> KeyRing:
        if (ring := self.keys.recent()) is not None:
            return ring
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(asyncio.to_thread(self.keys.lately))
        try:
            return await asyncio.shield(self._reading)
        except (RedisUnavailable, redis.RedisError) as exc:
            raise RedisUnavailable("Redis does not answer, so no key can be checked; ask again") from exc


def needs(scope: str, *, whole: bool = True) -> Callable[[Request], Awaitable[Asker]]:
    """The dependency of a route. `whole`: its answer is about the whole pipeline, not about workloads."""

    async def asker(request: Request) -> Asker:
        found: Asker = await request.app.state.api.doorkeeper.admit(request)
        if not found.key.may(scope):
            raise AskRefused(
                403, f"the key {found.name!r} may not do this; it needs the scope {scope!r}, and has "
                f"{', '.join(found.key.scopes)}"
            )  # fmt: skip
        if whole and found.only:
            raise AskRefused(
                403,
                f"the key {found.name!r} sees only {', '.join(found.only)}, and this is about the whole "
                "pipeline; ask with a key without workloads",
            )
        return found

    return asker


def _own_key(digest: str) -> SenderKey:
    from datetime import UTC, datetime

    return SenderKey(name=LOCAL, digest=digest, created=datetime.now(UTC), scopes=(ADMIN,))
