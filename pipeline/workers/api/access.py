"""Who may ask: every request has a key, of `logweir keys` or of the stack's own file.

A key with workloads sees only what is theirs, and nothing of the pipeline as a whole.
"""

import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlsplit

import redis
from fastapi import Request

from pipeline.errors import RedisUnavailable
from pipeline.service.access.keys import (
    ADMIN,
    MAX_KEY_NAME,
    SenderKey,
    SenderKeys,
    authorization_texts,
    key_digest,
)
from pipeline.settings.listeners import Listener
from pipeline.settings.proxies import TrustedProxies
from pipeline.units import one_line
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
    """Finds the key of a request. `own`: the digest of the stack's own key, "" without. `proxies`: they say
    who looks at the console."""

    keys: SenderKeys
    listener: Listener
    own: str = ""
    proxies: TrustedProxies = field(default_factory=TrustedProxies)

    async def admit(self, request: Request) -> Asker:
        """Who asks. Raises AskRefused."""
        texts = list(authorization_texts(request.headers.get("authorization", "")))
        if not texts and (other := request.headers.get("x-api-key")):
            texts = [other]
        if not texts:
            raise AskRefused(401, f"this needs a key, in the header `Authorization: Bearer KEY`{REMEDY}")
        if any(map(self.is_own, texts)):
            return own_asker(self.own)
        try:
            found = (await self.keys.ring()).find(texts)
        except (RedisUnavailable, redis.RedisError) as exc:
            raise RedisUnavailable("Redis does not answer, so no key can be checked; ask again") from exc
        if found is None:
            raise AskRefused(
                401, "the key is not known here or has expired; `logweir keys list` shows the others"
            )
        return Asker(name=found.name, key=found)

    async def still(self, asker: Asker) -> bool:
        """Whether a key is as good as when its stream began. Where Redis does not answer, it is."""
        if asker.key.digest in ("", self.own):  # of the machine's own user, or of a proxy
            return True
        try:
            key = (await self.keys.ring()).by_digest.get(asker.key.digest)
        except (RedisUnavailable, redis.RedisError):
            return True
        return key is not None and key.holds(datetime.now(UTC))

    def check_host(self, request: Request) -> None:
        """Web pages of other origins do not ask, and no public name leads to loopback. Raises AskRefused."""
        host = request.headers.get("host")
        own = self.trusts(request) or is_own_host(host, self.listener.host)  # a proxy keeps the public name
        if self.listener.loopback and not own:
            raise AskRefused(421, f"this is not {str(host)[:100]!r}; ask {self.listener.address}")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != (host or "").lower():
            raise AskRefused(403, f"pages of {origin[:100]!r} may not ask this API; ask from its own host")

    def trusts(self, request: Request) -> bool:
        """Whether the connection is one of a trusted proxy."""
        return request.client is not None and self.proxies.trusts(request.client.host)

    def proxied(self, request: Request) -> Asker | None:
        """The person whom a trusted proxy names, None where it names nobody. Raises AskRefused for one
        without a role."""
        if not self.trusts(request):
            return None
        user = _only(request, self.proxies.user)
        if not user:
            return None
        groups = [group.strip() for group in _only(request, self.proxies.groups).split(",")]
        scope = self.proxies.scope_of(groups)
        name = one_line(user)[:MAX_KEY_NAME]
        if scope is None:
            raise AskRefused(403, f"no group of {name!r} has a role here; api_proxies gives one")
        key = SenderKey(name=name, digest="", created=datetime.now(UTC), scopes=(scope,))
        return Asker(name=name, key=key)

    def is_own(self, text: str) -> bool:
        """Whether it is the stack's own key, which is good on loopback alone."""
        return bool(self.own) and self.listener.loopback and hmac.compare_digest(key_digest(text), self.own)


def _only(request: Request, header: str) -> str:
    """The value of a header, "" without. Raises AskRefused for one that a proxy passed on beside its own."""
    values = request.headers.getlist(header) if header else []
    if len(values) > 1:
        raise AskRefused(
            403, f"the header {header} comes twice; the proxy must replace what its clients send in it"
        )
    return values[0].strip() if values else ""


def needs(*scopes: str, whole: bool = True) -> Callable[[Request], Awaitable[Asker]]:
    """The dependency of a route, for keys with one of these scopes.

    `whole`: its answer is about the whole pipeline, not about workloads.
    """

    async def asker(request: Request) -> Asker:
        found: Asker = await request.app.state.api.doorkeeper.admit(request)
        if not any(map(found.key.may, scopes)):
            wanted = " or ".join(map(repr, scopes))
            raise AskRefused(
                403, f"the key {found.name!r} may not do this; it needs the scope {wanted}, and has "
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


async def while_admitted(
    stream: AsyncGenerator[bytes, None], doorkeeper: Doorkeeper, asker: Asker
) -> AsyncIterator[bytes]:
    """The stream for as long as its key is good: one that is revoked hears nothing more."""
    async with aclosing(stream):
        async for piece in stream:
            if not await doorkeeper.still(asker):
                return
            yield piece


def own_asker(digest: str = "") -> Asker:
    """The user of this machine. `digest`: of the stack's own key."""
    return Asker(
        name=LOCAL, key=SenderKey(name=LOCAL, digest=digest, created=datetime.now(UTC), scopes=(ADMIN,))
    )
