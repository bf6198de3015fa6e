"""Who may look at Flower: a session of the console, or a key, with the scope `operate`.

Flower has a port of its own, so its inline scripts stand in an origin of their own: the console's policy
stays as strict as it is, and the API refuses requests of that origin. Browsers send the cookie of a session
to every port of a host, and no script reads it.
"""

import hmac
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import redis

from pipeline.errors import RedisUnavailable
from pipeline.records.batch import utc_now
from pipeline.service.access.console_sessions import LOCAL, ConsoleSessions
from pipeline.service.access.keys import OPERATE, SenderKey, SenderKeys, authorization_texts, key_digest
from pipeline.service.access.own_key import read_own_key
from pipeline.settings import Settings

REALM: Final = 'Basic realm="Logweir: any user, and a key as the password"'
_COOKIE: Final = re.compile(r"lw_[0-9]{1,5}")
_MOST: Final = 8  # cookies that are looked up, of as many consoles on one host
_SIGN_IN: Final = (
    "Flower is for who may operate this pipeline. Sign in on its console (`logweir console` prints a link), or give a "
    "key with the scope operate as a password"
)


class FlowerRefusal(NamedTuple):
    """Why a request is not answered."""

    status: int
    sentence: str


class FlowerGate:
    """Looks at each request. `loopback`: only this machine reaches Flower."""

    def __init__(self, client: "redis.Redis", settings: Settings, *, loopback: bool) -> None:
        self._keys = SenderKeys(client, settings)
        self._sessions = ConsoleSessions(client, settings)
        self._data_dir = settings.data.dir
        self._loopback = loopback

    def refusal(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> FlowerRefusal | None:
        """None for those who may look. `headers`: by names in any case, as Tornado has them."""
        texts = list(authorization_texts(headers.get("Authorization", "")))
        texts = texts or [text for text in [headers.get("X-API-Key", "")] if text]
        try:
            if texts:
                if self._is_own(texts):
                    return None
                key = self._keys.lately().find(texts)
            else:
                key = self._looker(cookies)
        except (RedisUnavailable, redis.RedisError):
            return FlowerRefusal(503, "Redis does not answer, so nobody can be checked; ask again")
        if key is None:
            return FlowerRefusal(401, _SIGN_IN)
        if not key.may(OPERATE) or key.workload or key.patterns:
            return FlowerRefusal(
                403, f"the key {key.name!r} may not look; it needs the scope operate for all workloads"
            )
        return None

    def _is_own(self, texts: list[str]) -> bool:
        own = read_own_key(self._data_dir) if self._loopback else ""
        return bool(own) and any(hmac.compare_digest(key_digest(text), key_digest(own)) for text in texts)

    def _looker(self, cookies: Mapping[str, str]) -> SenderKey | None:
        """Of several sessions the one that may most; the machine's own user has a key for everything."""
        secrets = [value for name, value in cookies.items() if _COOKIE.fullmatch(name) and value][:_MOST]
        digests = [session.key for session in map(self._sessions.find, secrets) if session is not None]
        now = utc_now()
        if LOCAL in digests and self._loopback:
            return SenderKey(name=LOCAL, digest="", created=now, scopes=(OPERATE,))
        ring = self._keys.lately().by_digest
        found = [ring[digest] for digest in digests if digest in ring and ring[digest].holds(now)]
        return max(found, key=lambda key: key.may(OPERATE), default=None)
