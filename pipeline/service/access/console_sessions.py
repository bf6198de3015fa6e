"""Sessions of the console, and the links that begin one, in Redis under the SHA-256 of their secrets.

A session stands for a key, and ends with it. A link is good once, for LINK_S, and begins a session of the
machine's own user; it is taken on loopback alone.
"""

import hmac
import json
import secrets
from dataclasses import dataclass
from typing import Any, Final

import redis

from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.service.access.keys import key_digest
from pipeline.settings import Settings

SESSION_S: Final = 12 * 3_600
LINK_S: Final = 600
LOCAL: Final = "local"  # the key of the machine's own user


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSession:
    """Who has signed in. `key`: the digest of the key, LOCAL for the machine's own user."""

    key: str
    secret: str

    @property
    def token(self) -> str:
        """Every form of this session carries it; a page of another origin cannot know it."""
        return hmac.new(self.secret.encode(), b"form", "sha256").hexdigest()[:32]


class ConsoleSessions:
    """Begin, find and end sessions. Every method raises RedisUnavailable."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)

    def link(self, url: str) -> str:
        """A new link to a console, good once."""
        secret = secrets.token_urlsafe(24)
        with answering():
            self.client.set(self.keys.console_link(key_digest(secret)), LOCAL, ex=LINK_S)
        return f"{url}/in?once={secret}"

    def take_link(self, secret: str) -> bool:
        """Whether the link is good. It is used up by the question."""
        with answering():
            return self.client.getdel(self.keys.console_link(key_digest(secret))) is not None

    def begin(self, key: str) -> ConsoleSession:
        """A new session of a key, by its digest."""
        session = ConsoleSession(key=key, secret=secrets.token_urlsafe(32))
        with answering():
            self.client.set(
                self.keys.console_session(key_digest(session.secret)), json.dumps({"key": key}), ex=SESSION_S
            )
        return session

    def find(self, secret: str) -> ConsoleSession | None:
        """The session of a cookie, None once it has ended."""
        with answering():
            raw: Any = self.client.get(self.keys.console_session(key_digest(secret)))
        return None if raw is None else ConsoleSession(key=json.loads(raw)["key"], secret=secret)

    def end(self, secret: str) -> None:
        """Ends a session."""
        with answering():
            self.client.delete(self.keys.console_session(key_digest(secret)))
