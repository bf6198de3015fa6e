"""A stack with the intake: what programs send over HTTP ends up in the results, once."""

import contextlib
import json
import os
import signal
import socket
import urllib.request

import psutil
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from e2e.harness import Up, running, until


def post(up: Up, path: str, body: bytes, content_type: str) -> bytes:
    url = up.facts["intake"][0]
    request = urllib.request.Request(url + path, data=body, headers={"Content-Type": content_type})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return bytes(answer.read())


def export(workload: str, *bodies: str) -> bytes:
    request = ExportLogsServiceRequest()
    resource = request.resource_logs.add()
    resource.resource.attributes.add(key="service.name").value.string_value = workload
    for n, body in enumerate(bodies):
        record = resource.scope_logs.add().log_records.add(time_unix_nano=1_763_632_800_123_456_000 + n)
        record.body.string_value, record.severity_number = body, 17
    return bytes(request.SerializeToString())


def bulk(workload: str, *bodies: str) -> bytes:
    pairs = (({"create": {"_index": workload}}, {"message": body, "level": "warning"}) for body in bodies)
    return "".join(json.dumps(part) + "\n" for pair in pairs for part in pair).encode()


def test_lines_sent_by_shippers_are_results_also_over_a_kill_of_the_intake() -> None:
    """The usual address, or the next one where another program has it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # another program has it: the same case
            stack.enter_context(socket.create_server(("127.0.0.1", 4318)))
        up = stack.enter_context(running({"LOGWEIR_INTAKE": "http://127.0.0.1:4318"}))
        (url,) = up.facts["intake"]
        assert url.startswith("http://127.0.0.1:43") and url != "http://127.0.0.1:4318"

        bodies = [f"payment {n} was refused" for n in range(20)]
        for _ in range(2):
            post(up, "/v1/logs", export("shop/pay", *bodies), "application/x-protobuf")
        answer = post(up, "/_bulk", bulk("till", *bodies), "application/x-ndjson")
        assert b'"errors":false' in answer
        up.settled("shop/pay")
        up.settled("till")
        paid, till = up.rows("shop/pay"), up.rows("till")
        assert sorted(paid["message"]) == sorted(till["message"]) == sorted(bodies)
        assert set(paid["level"]) == {"error"} and set(till["level"]) == {"warning"}
        assert paid["timed"].all() and set(paid["service"]) != {None}

        assert up.logweir("health", "intake").returncode == 0
        assert up.status()["intake"] == [url]
        shown = up.logweir("intake").stdout
        assert f"lines come in at {url}" in shown and f"{url}/loki/api/v1/push" in shown

        before = up.pid("intake")
        os.kill(before, signal.SIGKILL)
        # The supervisor holds the socket: a request waits for the next process.
        post(up, "/_bulk", bulk("till", *bodies), "application/x-ndjson")
        assert up.totals("till")["accepted"] == 40
        until(lambda: up.pid("intake") != before, what="the intake was started again")
        assert not psutil.pid_exists(before)
        assert up.stop() == 0
