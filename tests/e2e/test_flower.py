"""Flower beside a real stack: what an operator sees, where it listens, and that the stack does not depend on
it."""

import base64
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from e2e.harness import Command, Up, marked, nothing_left, ordinary, running, sentence, until

LOGIN = "ops:s3cret"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def get(url: str, login: str | None = LOGIN, *, post: bool = False) -> tuple[int, str]:
    """Status and body; (0, why) when nothing answers."""
    request = urllib.request.Request(url, data=b"" if post else None)
    if login is not None:
        request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()
    except OSError as exc:
        return 0, str(exc)


def tasks(up: Up) -> dict[str, dict[str, Any]]:
    """What Flower knows of tasks; empty while it starts."""
    code, body = get(f"{up.facts['flower']}/api/tasks?limit=200")
    return dict(json.loads(body)) if code == 200 else {}


@pytest.fixture(scope="module")
def watched() -> Iterator[Up]:
    """A stack with Flower and a login."""
    with running(
        {"LOGWEIR_FLOWER": "yes", "FLOWER_BASIC_AUTH": LOGIN, "LOGWEIR_FLOWER_PORT": str(free_port())}
    ) as up:
        until(lambda: get(f"{up.facts['flower']}/healthcheck")[0] == 200, what="Flower answers")
        yield up


def test_it_shows_every_worker_by_role_and_device_and_says_where_it_is(watched: Up) -> None:
    url, host = watched.facts["flower"], socket.gethostname()
    wanted = {f"{n}.cpu@{host}" for n in ("ingest-1", "infer-cpu", "drain", "store", "train")}

    def seen() -> bool:
        code, body = get(f"{url}/api/workers?refresh=1")
        return code == 200 and wanted <= set(json.loads(body))

    until(seen, what="Flower knows every worker")
    assert watched.status()["flower"] == url
    assert f"watch it  {url}" in watched.logweir("status").stdout


def test_a_task_is_shown_by_workload_lines_and_id_and_never_by_a_line(watched: Up) -> None:
    watched.send([*ordinary(70), "2026-11-20T10:59:00Z INFO app: token q9x7secret"], "shop/app")

    def of(name: str) -> list[dict[str, Any]]:
        return [t for t in tasks(watched).values() if t["name"] == name and "shop/app" in str(t["args"])]

    names = ("logweir.ingest", "logweir.drain", "logweir.store")

    def ended() -> bool:  # events of one task may come one by one
        return all(any(task["state"] == "SUCCESS" for task in of(name)) for name in names)

    until(ended, what="Flower has seen the end of each step")
    for name in names:
        task = of(name)[-1]
        workload, lines, batch = task["args"].split(", ")
        assert (workload, lines) == ("shop/app", "71 lines") and len(batch) > 8
        assert task["state"] == "SUCCESS"
    assert "q9x7secret" not in json.dumps(tasks(watched))
    assert {t["name"] for t in tasks(watched).values()} <= {f"logweir.{n}" for n in ("ingest", "infer", "drain", "store")}  # fmt: skip


def test_a_failed_task_tells_its_reason(watched: Up) -> None:
    with watched.frozen("ingest-1"):
        done = watched.logweir("send", watched.write(ordinary(30)), "--workload", "damaged", "--json")
        assert done.returncode == 0, done.stderr
        with watched.client() as client:
            (key,) = list(client.scan_iter(match="{logweir}:payload:*"))
            client.set(key, os.urandom(500))
    watched.settled("damaged")

    def failed() -> list[dict[str, Any]]:
        return [t for t in tasks(watched).values() if t["state"] == "FAILURE"]

    until(lambda: any("given up" in t["exception"] for t in failed()), what="Flower shows the last failure")
    batch = key.decode().rpartition(":")[2]
    assert all(batch in t["args"] and "bytes is damaged" in t["exception"] for t in failed())
    page = get(f"{watched.facts['flower']}/task/{failed()[0]['uuid']}")[1]
    assert "bytes is damaged" in page and batch in page
    assert "Traceback" not in page and "StepFailed" not in page  # the wrapper is nothing to look at


def test_nobody_looks_without_the_login_and_ps_does_not_show_it(watched: Up) -> None:
    url = watched.facts["flower"]
    assert [get(url + path, None)[0] for path in ("/workers", "/tasks", "/api/workers")] == [401] * 3
    assert get(f"{url}/workers", "ops:wrong")[0] == 401
    assert get(f"{url}/workers")[0] == 200
    commands = [" ".join(process.cmdline()) for process in marked(watched.mark)]
    assert any("pipeline.workers.flower" in c for c in commands)
    assert not any("s3cret" in c for c in commands)


def test_nobody_can_shut_down_a_worker_there(watched: Up) -> None:
    worker, name = watched.pid("store"), f"store.cpu@{socket.gethostname()}"
    code, why = get(f"{watched.facts['flower']}/api/worker/shutdown/{name}", post=True)
    assert code in (401, 403, 405) and "read" in why.lower(), (code, why)
    assert psutil.pid_exists(worker) and watched.pid("store") == worker


def test_a_second_stack_gets_a_port_of_its_own_and_goes_on_when_flower_keeps_dying(watched: Up) -> None:
    wanted = watched.facts["flower"].rpartition(":")[2]
    with running({"LOGWEIR_FLOWER": "yes", "LOGWEIR_FLOWER_PORT": wanted}) as up:
        url = up.facts["flower"]
        assert url != watched.facts["flower"]
        until(lambda: get(f"{url}/workers", None)[0] == 401, what="the second Flower asks for a key")
        assert get(f"{watched.facts['flower']}/workers")[0] == 200

        def now() -> dict[str, Any]:
            return dict(json.loads((up.data / "stack.json").read_text()))

        (first,) = now()["flower_pids"]
        os.kill(first, signal.SIGKILL)
        until(lambda: now()["flower_pids"] != [first], what="it is started again")
        until(lambda: get(f"{url}/workers", None)[0] == 401, what="it is back at its place")
        while now()["flower"] is not None:
            last = now()["flower_pids"]
            os.kill(last[0], signal.SIGKILL)
            until(lambda last=last: now()["flower_pids"] != last, what="its death was seen")  # type: ignore[misc]
        assert up.status()["flower"] is None
        assert up.err().count("worker.given_up") == 1
        assert up.listeners() == set()
        up.send(ordinary(20), "after")  # the stack goes on
        assert up.stop() == 0


def test_an_open_door_off_loopback_is_refused_before_anything_starts(logweir: Command) -> None:
    done = logweir("up", "--data-dir", "d", LOGWEIR_FLOWER="yes", LOGWEIR_FLOWER_ADDRESS="0.0.0.0")
    assert "needs authentication" in sentence(done)
    assert not (logweir.cwd / "d").exists()


def test_flower_ends_with_a_supervisor_that_was_killed() -> None:
    with running({"LOGWEIR_FLOWER": "yes", "LOGWEIR_FLOWER_PORT": str(free_port())}) as up:
        until(lambda: get(f"{up.facts['flower']}/healthcheck")[0] == 200, what="Flower answers")
        up.process.kill()
        nothing_left(up.mark)
        assert get(f"{up.facts['flower']}/healthcheck")[0] == 0
