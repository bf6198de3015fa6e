"""`python -m pipeline.workers.flower [FLOWER OPTIONS]`: Flower on the pipeline's own settings, for looking
only.

Flower shows events, which Redis may lose: the ledger is for counting. It runs read-only, because its buttons
would end supervised workers or revoke wake-ups that the sweeper sends again. `--read_only=False` on the
command line enables the buttons; `logweir up` never does. On loopback it answers sessions and keys of the
console (service/access/flower_gate.py); with a login of its own it answers that alone. Off loopback it
refuses to start without such a login. It writes nothing to disk, and its memory is bounded."""

import ast
import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipeline.errors import BadInput
from pipeline.logs import logger, set_up
from pipeline.messages.app import make_app
from pipeline.redis.connection import connect
from pipeline.service.access.flower_gate import REALM, FlowerGate, FlowerRefusal
from pipeline.settings import Settings
from pipeline.workers import sockets
from pipeline.workers.exits import exit_code
from pipeline.workers.tethered import tether

REDIS_S: Final = 2.0  # a page waits no longer for an answer about its visitor
# Tornado waits an hour for a request, for ever for its body, and reads 100 MB before the gate is asked.
REQUEST_S: Final = 60.0
MAX_BODY: Final = 256 << 10  # the form of a table has 5 KiB
# They precede the options of the command line, which override them.
OPTIONS: Final = (
    "--read_only=True",
    # Our workers send events always; asking them every five seconds would only disturb.
    "--enable_events=False",
    # A task with its four events was measured at 5.4 KiB here: 53 MiB at most.
    "--max_tasks=10000",
    # Replicas come and go under names of their own.
    "--purge_offline_workers=3600",
    "--tasks_columns=name,args,state,exception,worker,uuid,received,runtime",
    # Our own logging stands already.
    "--logging=none",
    # Flower would run any flowerconfig.py in its working directory, which is the data directory.
    f"--conf={os.devnull}",
)


def arguments(argv: Sequence[str], settings: Settings) -> list[str]:
    """Flower's arguments with ours in front. Raises BadInput for an open door off loopback."""
    chosen = _options(argv)
    address = chosen.get("address", settings.stack.flower_address)
    # OAuth keys (--oauth2_key) without the rule who may enter (--auth) open the door to everybody.
    check_login(
        address, chosen.get("basic_auth", settings.stack.flower_auth), guarded=bool(chosen.get("auth"))
    )
    return ["flower", f"--address={address}", *OPTIONS, *(a for a in argv if _name(a) != "address")]


def check_login(address: str, auth: str | None, *, guarded: bool = False) -> None:
    """Refuse an open door off loopback, and logins that Flower would read otherwise. Raises BadInput."""
    for login in [] if auth is None else auth.split(","):
        user, _, password = login.partition(":")
        if not (user and password and login.isascii()):
            raise BadInput(
                "FLOWER_BASIC_AUTH is not user:password; both are ASCII and not empty, "
                "a comma separates several logins"
            )
    if not _loopback(address) and auth is None and not guarded:
        raise BadInput(
            f"Flower on {address or 'every address'} needs authentication; "
            f"set FLOWER_BASIC_AUTH=user:password, or let it listen on 127.0.0.1"
        )


def open_listener(settings: Settings) -> socket.socket:
    """A listening socket on the wanted port, or on the next free one. Raises BadInput."""
    check_login(settings.stack.flower_address, settings.stack.flower_auth)
    return sockets.listen("flower", settings.stack.flower_address, settings.stack.flower_port)


def main(argv: Sequence[str]) -> int:
    settings = Settings.load()
    set_up(settings.stack.log_level)
    chosen = _options(argv)
    for_flower = [a for a in argv if _name(a) != "fd"]
    opened = None
    try:
        args = arguments(for_flower, settings)
        if "fd" in chosen:
            opened = socket.socket(fileno=int(chosen["fd"]))
        elif not chosen.keys() & {"port", "unix_socket"}:
            opened = open_listener(
                settings.replace(flower_address=chosen.get("address", settings.stack.flower_address))
            )
    except BadInput as exc:
        sys.stderr.write(f"logweir: {exc}\n")
        return 2
    if settings.internal.supervisor_pid:
        tether(settings.internal.supervisor_pid, grace_s=0.0)  # there is nothing to save
    # Off loopback it has a login, and may stand behind a proxy under a name that it does not know.
    any_host = not _loopback(chosen.get("address", settings.stack.flower_address))
    _prepare(settings, opened, any_host=any_host, gate=_gate(settings, chosen))
    make_app(settings).start(args)
    return 0


def _gate(settings: Settings, chosen: Mapping[str, str]) -> FlowerGate | None:
    """Who may look; None where a login of Flower decides that."""
    if settings.stack.flower_auth is not None or chosen.get("basic_auth") or chosen.get("auth"):
        return None
    # Off loopback check_login has asked for a login.
    return FlowerGate(connect(settings, timeout_s=REDIS_S), settings, loopback=True)


def _prepare(
    settings: Settings, opened: socket.socket | None, *, any_host: bool, gate: FlowerGate | None
) -> None:
    """Tell Flower what its arguments cannot say: the login, which `ps` would show, and the open socket.

    Without `any_host` it answers under names of this machine alone."""
    from flower import command  # type: ignore[import-untyped] # it publishes no types
    from flower.options import options  # type: ignore[import-untyped]
    from tornado.httpserver import HTTPServer
    from tornado.web import ErrorHandler, RequestHandler

    options.format_task = plain
    if settings.stack.flower_auth is not None:
        options.basic_auth = settings.stack.flower_auth.split(",")
    if opened is not None:
        opened.setblocking(False)

    class Refused(RequestHandler):
        def initialize(self, refusal: FlowerRefusal) -> None:
            self.refusal = refusal

        def prepare(self) -> None:
            self.set_status(self.refusal.status)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.set_header("Cache-Control", "no-store")
            if self.refusal.status == 401:
                self.set_header("WWW-Authenticate", REALM)
            self.finish(f"{self.refusal.sentence}\n")

    class Flower(command.Flower):  # type: ignore[misc]
        def find_handler(self, request: Any, **kwargs: Any) -> Any:
            host = request.headers.get("Host")
            if not any_host and not sockets.is_own_host(host, settings.stack.flower_address):
                status = int(sockets.WRONG_HOST.partition(" ")[0])
                return self.get_handler_delegate(request, ErrorHandler, {"status_code": status})
            cookies = {name: morsel.value for name, morsel in request.cookies.items()}
            refusal = None
            if gate is not None and request.path != "/healthcheck":  # which says OK and no more
                refusal = gate.refusal(request.headers, cookies)
            if refusal is None:
                return super().find_handler(request, **kwargs)
            return self.get_handler_delegate(request, Refused, {"refusal": refusal})

        def start_http_server(self) -> int:
            if opened is None:
                return int(super().start_http_server())
            server = HTTPServer(
                self, ssl_options=self.ssl_options, xheaders=self.options.xheaders,
                idle_connection_timeout=REQUEST_S, body_timeout=REQUEST_S, max_body_size=MAX_BODY,
            )  # fmt: skip
            server.add_sockets([opened])
            return int(opened.getsockname()[1])

    command.Flower = Flower
    if opened is not None:
        logger(url=sockets.url(opened)).info("flower.starts")


def plain(task: Any) -> Any:
    """The copy of a task that Flower shows: of a failed step its reason alone.

    Its traceback would only show where StepFailed was raised; the worker's log has that of the fault.
    """
    text = getattr(task, "exception", None) or ""
    if text.startswith("StepFailed("):
        with contextlib.suppress(ValueError, SyntaxError):
            task.exception = ast.literal_eval(text.removeprefix("StepFailed(").removesuffix(")"))
            task.traceback = None
    return task


def _options(argv: Sequence[str]) -> dict[str, str]:
    return {_name(a): a.partition("=")[2] for a in argv}


def _name(argument: str) -> str:
    """The option that Tornado takes this argument for: any number of dashes, `-` and `_` are the same."""
    return argument.lstrip("-").partition("=")[0].replace("-", "_")


def _loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
