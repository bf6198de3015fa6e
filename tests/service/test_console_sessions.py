"""Sessions of the console, and the links that begin one."""

import redis

from pipeline.redis.keys import Keys
from pipeline.service.access.console_sessions import LINK_S, LOCAL, SESSION_S, ConsoleSessions
from pipeline.service.access.keys import key_digest
from pipeline.settings import Settings


def test_a_link_is_good_once(client: "redis.Redis", settings: Settings) -> None:
    sessions = ConsoleSessions(client, settings)
    link = sessions.link("http://127.0.0.1:4380")
    address, _, secret = link.partition("/in?once=")
    assert address == "http://127.0.0.1:4380" and len(secret) >= 32
    assert not sessions.take_link("another") and sessions.take_link(secret) and not sessions.take_link(secret)
    assert sessions.link(address) != link


def test_a_session_is_found_by_its_secret_until_it_ends(client: "redis.Redis", settings: Settings) -> None:
    sessions = ConsoleSessions(client, settings)
    begun, other = sessions.begin("digest"), sessions.begin(LOCAL)
    assert sessions.find(begun.secret) == begun and begun.key == "digest"
    assert begun.token != other.token and begun.token not in begun.secret
    assert sessions.find("another") is None and sessions.find("") is None
    sessions.end(begun.secret)
    assert sessions.find(begun.secret) is None and sessions.find(other.secret) == other


def test_redis_holds_no_secret_and_forgets_by_itself(client: "redis.Redis", settings: Settings) -> None:
    sessions, keys = ConsoleSessions(client, settings), Keys(settings.redis.key_prefix)
    secret = sessions.link("http://h").partition("once=")[2]
    begun = sessions.begin(LOCAL)
    stored = b" ".join(
        name + (client.get(name) or b"") for name in client.scan_iter(f"{settings.redis.key_prefix}*")
    ).decode()
    assert secret not in stored and begun.secret not in stored and begun.token not in stored
    assert 0 < client.ttl(keys.console_link(key_digest(secret))) <= LINK_S
    assert 0 < client.ttl(keys.console_session(key_digest(begun.secret))) <= SESSION_S
