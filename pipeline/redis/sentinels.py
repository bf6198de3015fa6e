"""Sentinels: the processes that know which Redis is the master, and name another one when it dies."""

from collections.abc import Callable
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from pipeline.redis.tls import failure, tls_arguments
from pipeline.settings.values import SentinelAddress

# A sentinel answers from memory. The next one is asked where this one is away.
ASK_S: Final = 1.0


class Sentinels(Sentinel):
    """Asks one sentinel after another for the master. Safe for threads, unlike redis-py's, which reorders its
    list while others read it."""

    def __init__(self, address: SentinelAddress, moved: Callable[[], None] = lambda: None) -> None:
        """`moved` is called when another master is named than before."""
        options = sentinel_options(address)
        super().__init__(address.sentinels, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
        self._names = [f"{host}:{port}" for host, port in address.sentinels]
        self._tls = address.tls is not None
        self._first = 0  # the one that answered last
        self._moved, self._master = moved, ("", 0)

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Raises MasterNotFoundError in one line: redis-py's names every option of the connections."""
        reasons, first = [], self._first
        for number in (*range(first, len(self.sentinels)), *range(first)):
            state = self.asked(number, service_name)
            if isinstance(state, str):
                reasons.append(f"{self._names[number]} {state}")
            elif not state["is_master"] or state["is_sdown"] or state["is_odown"]:
                reasons.append(f"{self._names[number]} says that it is down")
            else:
                self._first = number
                before, self._master = self._master, (state["ip"], state["port"])
                if before not in (("", 0), self._master):
                    self._moved()
                return self._master
        raise MasterNotFoundError(f"no sentinel names a master {service_name!r}: {', '.join(reasons)}")

    def asked(self, number: int, master: str) -> dict[str, Any] | str:
        """What this sentinel knows of a master, or why it says nothing."""
        try:
            masters: Any = self.sentinels[number].sentinel_masters()
        except redis.AuthenticationError as exc:
            return f"refuses the login ({exc})"
        except redis.ConnectionError as exc:
            return failure(str(exc), tls=self._tls) or "does not answer"
        except redis.TimeoutError:
            return f"did not answer within {ASK_S:.0f} s"
        except redis.ResponseError as exc:
            return f"refuses to answer ({exc})"
        finally:
            # Seldom asked, and one that froze would be asked on this connection again.
            self.sentinels[number].close()
        if master not in masters:
            return f"knows only {', '.join(sorted(masters)) or 'no master'}"
        state: dict[str, Any] = masters[master]
        return state


def sentinel_options(address: SentinelAddress) -> dict[str, Any]:
    """How a sentinel is asked, by redis-py and by kombu."""
    return {
        "username": address.sentinel_username,
        "password": address.sentinel_password,
        "socket_timeout": ASK_S,
        "socket_connect_timeout": ASK_S,
        "retry": Retry(NoBackoff(), 0),
        **tls_of(address),
    }


def tls_of(address: SentinelAddress) -> dict[str, Any]:
    """The arguments that make a connection to a sentinel or a server one with TLS; none without."""
    return {} if address.tls is None else {"ssl": True, **tls_arguments(address.tls)}
