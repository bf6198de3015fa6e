"""What somebody without a key does to every listener, in a process of its own that ends with its input.

`python -m bench._attacks PHASE` reads the ports as a line of JSON."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import msgpack

IDLE: Final = 2_000  # connections to each listener: nearly what a process of the intake takes
CROWD: Final = 3_000  # more than that
IDLE_GRPC: Final = 3  # there are so many times fewer of gRPC
UNFINISHED: Final = 300  # to each, and so many times what a message may have
HOLD_S: Final = 20.0  # until a held connection is made again
OPENING: Final = 64  # connections at a time
KEY_BYTES: Final = 60_000
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and empty settings

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
numbers = itertools.count()


@asynccontextmanager
async def connected(port: int, *, source: str | None = None) -> AsyncIterator[Streams]:
    where = None if source is None else (source, 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=where)
    try:
        yield reader, writer
    finally:
        writer.close()


async def held(streams: Streams, *, for_s: float = HOLD_S) -> None:
    """Until the listener closes the connection, or for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(for_s):
            while await streams[0].read(65_536):
                pass


def text(size: int) -> bytes:
    """That nobody has sent before."""
    return b"%x-%d-" % (random.getrandbits(64), next(numbers)) + b"k" * size


# ---- connections that say nothing ----------------------------------------------------------------


async def idle(name: str, port: int) -> None:
    async with connected(port) as streams:
        if name == "grpc":  # one without a greeting is closed soon
            streams[1].write(PREFACE)
        await held(streams, for_s=600)


# ---- messages without an end ---------------------------------------------------------------------


async def unfinished(name: str, port: int) -> None:
    async with connected(port) as streams:
        reader, writer = streams
        if name == "http":
            if next(numbers) % 2:
                writer.write(b"POST /api/v1/lines HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + text(KEY_BYTES))
            else:
                writer.write(
                    b"POST /api/v1/lines HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 20000000\r\n\r\n"
                )
                writer.write(b"x" * (1 << 20))
        elif name == "grpc":
            writer.write(PREFACE)
        elif name == "relp":
            writer.write(b"1 open 30 relp_version=0\ncommands=syslog\n2 syslog 65000 " + text(64_000))
        elif name == "syslog":
            writer.write(text(65_000))
        else:
            await reader.read(1000)  # its greeting
            writer.write(b"\xc6" + (8 << 20).to_bytes(4, "big"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOLD_S):
                    for _ in range(127):
                        writer.write(b"x" * 65_536)
                        await writer.drain()
        await held(streams)


# ---- giant keys ----------------------------------------------------------------------------------


async def keys(name: str, port: int) -> None:
    async with connected(port) as streams:
        reader, writer = streams
        if name == "http":
            size = random.choice((KEY_BYTES, 4_000, 50_000_000))
            kind = next(numbers) % 4
            if size > KEY_BYTES:  # a head without an end
                writer.write(b"GET /x HTTP/1.1\r\n")
                while not writer.is_closing():
                    writer.write(b"X-%s: a\r\n" % text(KEY_BYTES))
                    await writer.drain()
                return
            path = text(size) if kind == 0 else b"api/v1/lines"
            more = (b"Authorization: Bearer %s", b"X-Forwarded-For: %s", b"Host: %s", b"X-%s: a")[kind]
            writer.write(
                b"POST /%s HTTP/1.1\r\n%s\r\nContent-Length: 2\r\n\r\na\n" % (path, more % text(size))
            )
        elif name == "grpc":
            writer.write(PREFACE + b"\0\x3f\xff\1\4\0\0\0\1" + os.urandom(0x3FFF))
        elif name == "relp":
            writer.write(b"1 open 60000 " + text(KEY_BYTES))
        elif name == "syslog":
            await asyncio.sleep(1.0)  # these are lines, which fill the pipeline
            writer.write(b"<13>1 2026-11-20T10:00:00.000Z %s app 7 - - hello\n" % text(4_000))
        else:
            await reader.read(1000)
            writer.write(msgpack.packb(["PING", text(1 << 20), b"salt", b"shown", "", ""]))
        await held(streams, for_s=1.0)


# ---- many senders --------------------------------------------------------------------------------


async def senders(name: str, port: int) -> None:
    source = f"127.{random.randrange(1, 255)}.{random.randrange(256)}.{random.randrange(1, 255)}"
    async with connected(port, source=source) as (reader, writer):
        if name == "http":
            writer.write(b"POST /api/v1/lines HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\na\n")
        elif name == "grpc":
            writer.write(PREFACE)
        elif name == "relp":
            writer.write(b"1 unknown 0\n")
        elif name == "forward":
            writer.write(msgpack.packb(["PING", "a", b"b", b"c", "", ""]))
        await held((reader, writer), for_s=0.5)


Attack = Callable[[str, int], Awaitable[None]]
# Each with how many at a time there are for each listener.
ATTACKS: Final[dict[str, tuple[Attack, int]]] = {
    "idle": (idle, IDLE),
    "crowd": (idle, CROWD),
    "unfinished": (unfinished, UNFINISHED),
    "keys": (keys, 8),
    "senders": (senders, 16),
}


async def main(phase: str) -> None:
    attack, count = ATTACKS[phase]
    loop = asyncio.get_running_loop()
    ports = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    opening = asyncio.Semaphore(OPENING)
    tries = 0

    async def again(name: str, port: int) -> None:
        nonlocal tries
        while True:
            async with opening:
                await asyncio.sleep(0)
            tries += 1
            with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError):
                await attack(name, port)
            await asyncio.sleep(random.random() * (0.5 if attack is idle else 0.01))

    async def begin() -> list["asyncio.Task[None]"]:
        running = []
        for at in range(count):
            some = {
                n: port
                for n, port in ports.items()
                if n != "grpc" or attack is not idle or at % IDLE_GRPC == 0
            }
            running += [asyncio.create_task(again(name, port)) for name, port in some.items()]
            if at % 20 == 19:
                await asyncio.sleep(0.1)
        return running

    beginning = asyncio.create_task(begin())
    await loop.run_in_executor(None, sys.stdin.read)
    print(json.dumps({"connections": tries}))
    sys.stdout.flush()
    beginning.cancel()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
