"""Sentinels: the processes that know which Redis is the master, and name another one when it dies."""

import time
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
COUNTED_S: Final = 60.0  # a replica that was added is known after so long at the latest


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
        self._replicas, self._counted = 0, -COUNTED_S  # monotonic

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Raises MasterNotFoundError in one line: redis-py's names every option of the connections."""
        reasons, first = [], self._first
        for number in (*range(first, len(self.sentinels)), *range(first)):
            state = self.question(number, service_name)
            if isinstance(state, str):
                reasons.append(f"{self._names[number]} {state}")
            elif not state["is_master"] or state["is_sdown"] or state["is_odown"]:
                reasons.append(f"{self._names[number]} says that it is down")
            else:
                self._first = number
                self._replicas, self._counted = int(state["num-slaves"]), time.monotonic()
                before, self._master = self._master, (state["ip"], state["port"])
                if before not in (("", 0), self._master):
                    self._moved()
                return self._master
        raise MasterNotFoundError(f"no sentinel names a master {service_name!r}: {', '.join(reasons)}")

    def replicas(self, master: str) -> int:
        """How many replicas the sentinels know, dead ones too, as of the last COUNTED_S. Raises
        MasterNotFoundError."""
        if time.monotonic() - self._counted > COUNTED_S:
            self.discover_master(master)
        return self._replicas

    def replaced(self, master: str, run_id: str) -> str:
        """Why the server of this run id may not be the master any more; "" where most sentinels say that it
        is, and none is about to replace it."""
        views = [self.question(number, master, keep=True) for number in range(len(self.sentinels))]
        states = [state for state in views if not isinstance(state, str)]
        if 2 * len(states) <= len(views):
            return "most sentinels do not answer"
        for name, state in zip(self._names, views, strict=True):
            # The one that leads a fail-over says so until it is over, though the master lives.
            if not isinstance(state, str) and (state["runid"] != run_id or _flags(state) != {"master"}):
                return f"the sentinel {name} has another master or is about to"
        return ""

    def close_idle(self) -> None:
        """Closes the connections that were kept."""
        for sentinel in self.sentinels:
            sentinel.connection_pool.disconnect(inuse_connections=False)

    def question(self, number: int, master: str, *, keep: bool = False) -> dict[str, Any] | str:
        """The state of a master by this sentinel, or why it says nothing. `keep`: it is asked again soon."""
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
            if not keep:
                self.sentinels[number].close()
        if master not in masters:
            return f"knows only {', '.join(sorted(masters)) or 'no master'}"
        state: dict[str, Any] = masters[master]
        return state


def _flags(state: dict[str, Any]) -> set[str]:
    """Of a master; redis-py splits them under one protocol of Redis alone."""
    flags: Any = state["flags"]
    return set(flags.split(",") if isinstance(flags, str) else flags)


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
