"""Good senders of every listener, in a process of their own: a small request now and then, and how long its
answer took. `python -m bench._good_senders` reads its places as a line of JSON, then a phase a line, and ends
with its input."""

import asyncio
import hashlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from typing import Any, Final

import grpc
import msgpack
import numpy as np
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

EVERY_S: Final = 0.2  # of each sender
FRESH: Final = 10  # one request in so many comes over a new connection
ANSWER_S: Final = 30.0
EXPORT: Final = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
SYSLOG_HOST: Final = "good-syslog"


class Refused(Exception):
    """The listener did not take a request."""


class Sender(ABC):
    """One connection of a protocol, and its requests."""

    answered = True  # the listener says that it has a request

    def __init__(self, place: dict[str, Any]) -> None:
        self.place, self.number = place, 0

    @abstractmethod
    async def connect(self) -> None: ...

    @abstractmethod
    async def send(self) -> None:
        """One request until its answer. Raises Refused, OSError, EOFError."""

    @abstractmethod
    async def close(self) -> None: ...


class Stream(Sender):
    """A sender with a plain connection."""

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.place["port"])

    async def close(self) -> None:
        self.writer.close()


class Http(Stream):
    async def send(self) -> None:
        body = b"INFO cart took %d ms\n" % self.number
        self.writer.write(
            b"POST /api/v1/lines?workload=good-http HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n"
            b"Content-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s"
            % (self.place["key"].encode(), len(body), body)
        )
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length")
        )
        said = await self.reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200"):
            raise Refused(f"{head[:30]!r} {said[:100]!r}")


class Grpc(Sender):
    async def connect(self) -> None:
        self.channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{self.place['port']}", options=(("grpc.use_local_subchannel_pool", 1),)
        )
        self.export = self.channel.unary_unary(EXPORT)

    async def send(self) -> None:
        request = ExportLogsServiceRequest()
        resource = request.resource_logs.add()
        resource.resource.attributes.add(key="service.name").value.string_value = "good-grpc"
        record = resource.scope_logs.add().log_records.add(time_unix_nano=time.time_ns())
        record.body.string_value = f"INFO cart took {self.number} ms"
        try:
            await self.export(
                request.SerializeToString(),
                metadata=(("authorization", f"Bearer {self.place['key']}"),),
                timeout=ANSWER_S,
            )
        except grpc.aio.AioRpcError as exc:
            raise Refused(f"{exc.code()} {exc.details()}") from None

    async def close(self) -> None:
        await self.channel.close()


class Relp(Stream):
    async def connect(self) -> None:
        await super().connect()
        offers = b"relp_version=0\ncommands=syslog"
        self.transaction = 1
        self.writer.write(b"1 open %d %s\n" % (len(offers), offers))
        await self._answer()

    async def send(self) -> None:
        message = b"<13>%s good-relp cart: took %d ms" % (_now(), self.number)
        self.transaction += 1
        self.writer.write(b"%d syslog %d %s\n" % (self.transaction, len(message), message))
        await self._answer()

    async def _answer(self) -> None:
        number, word, length = (await self.reader.readuntil(b" ")), await self.reader.readuntil(b" "), b""
        while not (byte := await self.reader.readexactly(1)).isspace():
            length += byte
        said = await self.reader.readexactly(int(length) + 1 if int(length) else 0)
        if int(number) != self.transaction or word != b"rsp " or not said.startswith(b"200"):
            raise Refused(repr(said[:100]))


class Forward(Stream):
    async def connect(self) -> None:
        await super().connect()
        self.unpacker = msgpack.Unpacker(raw=True)
        _, options = await self._value()
        salt, name, key = b"0123456789abcdef", b"good", self.place["secret"].encode()
        shown = hashlib.sha512(salt + name + options[b"nonce"] + key).hexdigest()
        self.writer.write(msgpack.packb(["PING", name.decode(), salt, shown, "", ""]))
        if not (await self._value())[1]:
            raise Refused("the shared key is not taken")

    async def send(self) -> None:
        chunk = f"{id(self)}-{self.number}"
        entries = [[int(time.time()), {"log": f"INFO cart took {self.number} ms"}]]
        self.writer.write(msgpack.packb(["good-forward", entries, {"chunk": chunk}]))
        if await self._value() != {b"ack": chunk.encode()}:
            raise Refused("another answer")

    async def _value(self) -> Any:
        while True:
            for value in self.unpacker:
                return value
            if not (data := await self.reader.read(65_536)):
                raise EOFError("the connection was closed")
            self.unpacker.feed(data)


class Syslog(Stream):
    answered = False

    async def send(self) -> None:
        if self.reader.at_eof():
            raise EOFError("the connection was closed")
        self.writer.write(b"<13>%s %s cart: took %d ms\n" % (_now(), SYSLOG_HOST.encode(), self.number))
        await self.writer.drain()


def _now() -> bytes:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime()).encode()


SENDERS: Final = {"http": Http, "grpc": Grpc, "relp": Relp, "forward": Forward, "syslog": Syslog}


class Watch:
    """What was sent in each phase, and how it went."""

    def __init__(self) -> None:
        self.phase = ""
        self.ms: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.refused: dict[str, Counter[str]] = defaultdict(Counter)
        self.sent: Counter[str] = Counter()

    async def run(self, name: str, place: dict[str, Any], after_s: float) -> None:
        """Requests of one sender until it is cancelled."""
        kept = SENDERS[name](place)
        await asyncio.sleep(after_s)
        await kept.connect()
        due, number = time.monotonic(), 0
        while True:
            number += 1
            one = kept if number % FRESH else SENDERS[name](place)
            one.number = number
            phase, began = self.phase, time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_S):
                    if one is not kept:
                        await one.connect()
                    await one.send()
                if one is not kept:
                    await one.close()
                self.sent[name] += 1
                if one.answered:
                    self.ms[phase][name].append((time.monotonic() - began) * 1000)
            except (Refused, OSError, EOFError, TimeoutError) as exc:
                self.refused[phase][f"{name}: {type(exc).__name__} {exc}"[:200]] += 1
                if one is kept:
                    kept = await self._again(name, place)
            due = max(due + EVERY_S, time.monotonic() - EVERY_S)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _again(self, name: str, place: dict[str, Any]) -> Sender:
        while True:
            one = SENDERS[name](place)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await one.connect()
                return one
            except (Refused, OSError, EOFError, TimeoutError) as exc:
                self.refused[self.phase][f"{name}: connecting {type(exc).__name__} {exc}"[:200]] += 1
                await asyncio.sleep(EVERY_S)

    def figures(self) -> dict[str, Any]:
        return {
            "sent": dict(self.sent),
            "phases": {
                phase: {
                    "requests": sum(map(len, found.values())),
                    "p50_ms": _percentile(found.values(), 50),
                    "p99_ms": _percentile(found.values(), 99),
                    "p99_ms_by_listener": {name: _percentile([ms], 99) for name, ms in sorted(found.items())},
                    "refused": sum(self.refused[phase].values()),
                    "why": dict(self.refused[phase].most_common(5)),
                }
                for phase, found in self.ms.items()
                if phase
            },
        }


def _percentile(several: Any, which: int) -> float:
    return round(float(np.percentile(np.concatenate([np.array(ms) for ms in several]), which)), 1)


async def main() -> None:
    loop = asyncio.get_running_loop()
    places = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    watch = Watch()
    running = [
        asyncio.create_task(watch.run(name, place, after_s=EVERY_S * at / len(places)))
        for at, (name, place) in enumerate(places.items())
    ]
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        watch.phase = line.strip()
        for task in running:
            if task.done():
                task.result()
    for task in running:
        task.cancel()
    print(json.dumps(watch.figures()))


if __name__ == "__main__":
    asyncio.run(main())
