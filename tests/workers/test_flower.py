"""Flower's door, and what it gets to see: worker names, short arguments, a failed step's reason."""

import http.client
import socket
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from polling import wait_until

from pipeline import detect
from pipeline.errors import BadInput
from pipeline.messages.app import make_app
from pipeline.messages.submit import shown_args
from pipeline.producer import Producer
from pipeline.records.delivery import Claim, Stage
from pipeline.service.access.console_sessions import LOCAL, ConsoleSessions
from pipeline.service.access.keys import SenderKeys, key_digest
from pipeline.service.access.own_key import make_own_key
from pipeline.settings import Settings, visible_devices
from pipeline.tasks import frontend
from pipeline.tasks.context import Context
from pipeline.workers import flower, sockets
from pipeline.workers.roles import device_name
from pipeline.workers.stack.stack import Stack

LOGIN = "ops:s3cret"


# ---- the door ------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.7", "logs.example", "127.0.0.1.example"])
def test_it_does_not_open_off_loopback_without_a_login(address: str) -> None:
    with pytest.raises(BadInput, match="needs authentication"):
        flower.arguments([f"--address={address}"], Settings())
    with pytest.raises(BadInput, match="needs authentication"):
        flower.open_listener(Settings(flower_address=address))
    assert f"--address={address}" in flower.arguments([], Settings(flower_address=address, flower_auth=LOGIN))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_on_loopback_it_opens_without_a_login(address: str) -> None:
    assert flower.arguments([], Settings(flower_address=address))[:2] == ["flower", f"--address={address}"]


@pytest.mark.parametrize("given", ["--oauth2_key=x", "--auth=", "--authx=y", "--auth_provider=p"])
def test_options_that_look_like_a_login_but_let_everybody_in_are_none(given: str) -> None:
    with pytest.raises(BadInput, match="needs authentication"):
        flower.arguments(["--address=0.0.0.0", given], Settings())


@pytest.mark.parametrize("spelt", ["-address=0.0.0.0", "---address=0.0.0.0"])
def test_an_address_counts_however_its_option_is_spelt(spelt: str) -> None:
    with pytest.raises(BadInput, match=r"0\.0\.0\.0 needs authentication"):
        flower.arguments(["--address=127.0.0.1", spelt], Settings())


@pytest.mark.parametrize("auth", ["", "user", "user:", ":word", "user:pass,word", "user:pässword"])
def test_a_login_that_flower_would_read_otherwise_is_refused_without_being_shown(auth: str) -> None:
    with pytest.raises(BadInput, match="is not user:password") as caught:
        flower.arguments([], Settings(flower_auth=auth))
    assert "word," not in str(caught.value) and "pässword" not in str(caught.value)


def test_it_is_read_only_unless_the_command_line_says_otherwise() -> None:
    ours = flower.arguments([], Settings())
    assert {"--read_only=True", "--enable_events=False", "--max_tasks=10000"} < set(ours)
    theirs = flower.arguments(["--read_only=False"], Settings())
    assert theirs.index("--read_only=False") > theirs.index("--read_only=True")


def test_this_flower_knows_every_option_we_give_it() -> None:
    # It drops unknown ones silently, and without read_only its buttons would work.
    from flower.command import is_flower_option

    assert all(is_flower_option(option) for option in flower.OPTIONS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_two_that_want_the_same_port_get_two() -> None:
    settings = Settings(flower_port=free_port())
    with flower.open_listener(settings) as one, flower.open_listener(settings) as two:
        assert one.getsockname()[1] == settings.stack.flower_port
        assert two.getsockname()[1] > settings.stack.flower_port
        assert sockets.url(two) == f"http://127.0.0.1:{two.getsockname()[1]}"


def test_its_url_is_one_that_a_browser_on_this_machine_can_open() -> None:
    with flower.open_listener(
        Settings(flower_address="0.0.0.0", flower_auth=LOGIN, flower_port=free_port())
    ) as opened:
        assert sockets.url(opened) == f"http://127.0.0.1:{opened.getsockname()[1]}"


def test_an_address_that_is_not_ours_is_said_with_its_remedy() -> None:
    with pytest.raises(BadInput, match=r"cannot listen on 192\.0\.2\.1 .*set flower_address"):
        flower.open_listener(Settings(flower_address="192.0.2.1", flower_auth=LOGIN))


def test_a_stack_with_an_open_door_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", flower_address="0.0.0.0")
    with pytest.raises(BadInput, match="needs authentication"), Stack(settings, flower=True):
        pass
    assert not (tmp_path / "data").exists()


def ask(port: int, *, cookie: str = "", key: str = "", host: str = "") -> tuple[int, str, str]:
    """The status, what it wants, and the text."""
    sent = {"Host": host or f"127.0.0.1:{port}"}
    sent |= {"Cookie": cookie} if cookie else {}
    sent |= {"Authorization": f"Basic {b64encode(f'any:{key}'.encode()).decode()}"} if key else {}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", "/workers", headers=sent)
        answer = connection.getresponse()
        return answer.status, answer.getheader("WWW-Authenticate", ""), answer.read().decode()


@pytest.mark.long
def test_it_is_seen_by_sessions_and_keys_that_may_operate(
    settings: Settings, client: "redis.Redis", tmp_path: Path
) -> None:
    port = free_port()
    settings = settings.replace(data_dir=tmp_path, flower_port=port)
    own = make_own_key(tmp_path).read_text().strip()
    keys, sessions = SenderKeys(client, settings), ConsoleSessions(client, settings)
    operator, reader = keys.add("operator", scopes=["operate"]), keys.add("reader", scopes=["read"])
    some = keys.add("some", scopes=["admin"], patterns=["shop/*"])
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.workers.flower"], stdout=out, stderr=out,
            env={**settings.to_environ(), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip

    def answers() -> bool:
        with suppress(OSError):
            return ask(port)[0] > 0
        return False

    def cookie(key: str) -> str:
        return f"lw_4380={sessions.begin(key).secret}"

    try:
        assert wait_until(answers, timeout_s=30), log.read_text()
        status, wants, text = ask(port)
        assert status == 401 and wants.startswith("Basic") and "logweir console" in text
        for key, status in ((own, 200), (operator, 200), (reader, 403), (some, 403), ("lw_wrong", 401)):
            assert ask(port, key=key)[0] == status, key
        for digest, status in (
            (LOCAL, 200),
            (key_digest(operator), 200),
            (key_digest(reader), 403),
            ("a", 401),
        ):
            assert ask(port, cookie=cookie(digest))[0] == status, digest
        assert ask(port, cookie="lw_4380=guessed; other=1")[0] == 401
        assert (
            ask(
                port,
                cookie=f"{cookie(key_digest(reader))}; {cookie('x')[:4]}1={sessions.begin(LOCAL).secret}",
            )[0]
            == 200
        )
        assert ask(port, key=own, host="evil.example")[0] == 421
        with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as raw:
            raw.sendall(
                b"POST /tasks/datatable HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n"
            )
            assert raw.recv(100).startswith(b"HTTP/1.1 400"), "a large body is refused before it is read"
        keys.revoke("operator")
        assert wait_until(lambda: ask(port, key=operator)[0] == 401, timeout_s=5)
    finally:
        process.terminate()
        process.wait(20)


def test_a_login_of_its_own_is_the_plain_way() -> None:
    assert flower._gate(Settings(flower_auth=LOGIN), {}) is None
    assert flower._gate(Settings(), {"auth": ".*@example.com"}) is None


# ---- what is shown -------------------------------------------------------------------------------


def test_arguments_tell_workload_lines_and_the_whole_id() -> None:
    assert shown_args("5f3a07-0", "shop/app", 1_200) == "shop/app, 1,200 lines, 5f3a07-0"
    assert shown_args("5f3a07-0", "shop/app", 1) == "shop/app, 1 line, 5f3a07-0"
    assert shown_args("5f3a07-0") == "5f3a07-0"
    assert shown_args("i" * 200) == "i" * 200


def test_a_workload_with_a_hostile_name_is_cut_and_printable() -> None:
    shown = shown_args("b", "x\x1b[31m\n" + "y" * 500, 3)
    assert shown.isprintable() and len(shown) < 80 and shown.endswith("…, 3 lines, b")


@pytest.mark.parametrize(
    ("device", "visible", "name"),
    [
        ("cpu", None, "cpu"),
        ("cpu", "1", "cpu"),
        ("cuda", None, "cuda0"),
        ("cuda:1", "", "cuda1"),
        ("cuda", "2", "cuda2"),
        ("cuda:1", "2, 3", "cuda3"),
        ("cuda:7", "2,3", "cuda3"),
        ("cuda", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "cuda-GPU-8932f937"),
    ],
)
def test_a_worker_is_named_by_the_device_it_works_on(device: str, visible: str | None, name: str) -> None:
    assert device_name(device, visible) == name
    assert visible_devices({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == visible


def test_a_failed_step_is_shown_with_its_reason_alone() -> None:
    task = flower.plain(
        SimpleNamespace(exception='StepFailed("can\'t read it")', traceback="Traceback of the wrapper")
    )
    assert (task.exception, task.traceback) == ("can't read it", None)


@pytest.mark.parametrize("exception", [None, "ValueError('x')", "StepFailed(cut", "WorkerLostError()"])
def test_any_other_failure_is_shown_as_it_is(exception: str | None) -> None:
    task = flower.plain(SimpleNamespace(exception=exception, traceback="Traceback"))
    assert (task.exception, task.traceback) == (exception, "Traceback")


# ---- what a real worker says ---------------------------------------------------------------------


class Watcher(threading.Thread):
    """Keeps the task events of a pipeline, as Flower does."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(daemon=True)
        self.app = make_app(settings)
        self.events: list[dict[str, Any]] = []
        self.ready = threading.Event()
        self.receiver: Any = None

    def run(self) -> None:
        with self.app.connection_for_read() as connection:
            self.receiver = self.app.events.Receiver(connection, handlers={"*": self.events.append})
            self.receiver.on_consume_ready = lambda *_args, **_kwargs: self.ready.set()
            self.receiver.capture()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


@contextmanager
def worker(settings: Settings, role: str) -> Iterator[Watcher]:
    """A real worker process, watched."""
    watcher = Watcher(settings)
    watcher.start()
    assert watcher.ready.wait(10)
    environ = {**settings.to_environ(), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.workers.cpu", role, f"{role}-7"],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield watcher
    finally:
        process.terminate()
        _, words = process.communicate(timeout=20)
        watcher.receiver.should_stop = True
        watcher.join(10)
    assert "StepFailed" not in words, words


@pytest.fixture
def context(settings: Settings) -> Context:
    # One attempt: the first failure is the last, so that nothing comes after what is looked at.
    once = settings.replace(max_attempts=1)
    return Context(make_app(once), once)


def send(context: Context, *lines: str) -> None:
    Producer(context.ledger, context.submit, context.settings).send(lines, workload="shop", batch_id="b-1")


def settled(context: Context, client: "redis.Redis", queue: str) -> bool:
    """No message waits and none is taken without being acknowledged."""
    prefix = context.settings.redis.key_prefix
    return not client.exists(f"{prefix}:{queue}", f"{prefix}:unacked")


@pytest.mark.long
def test_a_failed_step_is_a_failed_task_with_its_reason_and_its_message_is_acknowledged(
    context: Context, client: "redis.Redis"
) -> None:
    send(context, "secret line")  # its message waits until the worker comes
    client.set(context.ledger.keys.payload("b-1"), b"damaged")
    with worker(context.settings, "ingest") as watcher:
        assert wait_until(lambda: bool(watcher.of("task-failed")), timeout_s=60)
        assert wait_until(lambda: settled(context, client, "ingest"), timeout_s=10)
    (received,), (failed,) = watcher.of("task-received"), watcher.of("task-failed")
    assert received["args"] == "shop, 1 line, b-1"
    assert "secret line" not in str(watcher.events)
    assert failed["hostname"] == received["hostname"] == f"ingest-7.cpu@{socket.gethostname()}"
    assert failed["exception"].startswith("StepFailed('given up after the first attempt: BadPayload")
    assert client.hget(context.ledger.keys.batch("b-1"), "state") == b"dead"


@pytest.mark.long
def test_a_step_that_waits_says_why_through_the_pool_of_a_scoring_worker(
    context: Context, client: "redis.Redis"
) -> None:
    send(context, "a line")
    claim = context.ledger.claim("b-1", Stage.INGEST, "the test")
    assert isinstance(claim, Claim)
    (records,) = frontend.prepared_batches(context, [claim], [None]).records
    # The live version of a store that lost its files: no other one can answer, so the batch waits.
    gone = {
        "version": "20260101T000000-gone",
        "generation": 1,
        "token": 1,
        "published": "2026-01-01T00:00:00Z",
    }
    client.hset(context.ledger.keys.model(), mapping=gone)
    client.sadd(context.ledger.keys.model_names, "shared")
    context.ledger.advance(claim, Stage.INFER, detect.distinct(records, gone["version"]))
    with worker(context.settings, "infer-cpu") as watcher:
        assert wait_until(lambda: bool(watcher.of("worker-online")), timeout_s=20)
        context.submit.wake(Stage.INFER, "b-1", workload="shop", lines=1)
        assert wait_until(lambda: bool(watcher.of("task-failed")), timeout_s=60)
        assert wait_until(lambda: settled(context, client, "infer.cpu"), timeout_s=10)
    (event,) = watcher.of("task-failed")
    assert "20260101T000000-gone" in event["exception"]
    assert event["hostname"] == f"infer-cpu-7.cpu@{socket.gethostname()}"
    assert client.hget(context.ledger.keys.batch("b-1"), "state") == b"infer"
