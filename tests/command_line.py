"""The command line in this process, on a test's own keys and directories."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from pipeline import cli
from pipeline.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


Verb = Callable[..., Said]


@contextmanager
def command_line(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    printed: "pytest.CaptureFixture[str]",
    *first: str,
    columns: int = 80,
) -> Iterator[Verb]:
    """A verb to call with the rest of its arguments. `first`: those of every call. `printed`: capsys or
    capfd.

    Handlers of signals are as before afterwards; the one of Ctrl-C must be already.
    """
    # The address in a variable of its own, as users have it, so that a test can take it away.
    monkeypatch.setenv("REDIS_URL", settings.redis.url or "")
    for name, value in settings.replace(redis_url=None).to_environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", str(columns))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    interrupt = signal.getsignal(signal.SIGINT)

    def run(*args: object) -> Said:
        printed.readouterr()
        code = cli.main((*first, *map(str, args)))
        said = printed.readouterr()
        return Said(code=code, out=said.out, err=said.err)

    yield run
    assert signal.getsignal(signal.SIGINT) == interrupt
    for number, handler in before.items():
        signal.signal(number, handler)
