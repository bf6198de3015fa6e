"""Messages without an answer, gathered from all senders of a listener and handed to the door together.

A batch leaves at 1,000 messages, at 1 MiB, or 50 ms after its first message. While the door is full, batches
wait here up to MOST_MESSAGES and MOST_BYTES. At that bound a stream is not read any more, and a datagram is
dropped and counted.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.records.delivery import NO_IDENTITY
from pipeline.service.senders import SentBy
from pipeline.sources.protocols.contract import Decoded
from pipeline.upkeep import call_later, start_task
from pipeline.workers.intake.door import Door
from pipeline.workers.intake.taking import seconds_to_next_try

AT_ONCE: Final = 1_000
AT_ONCE_BYTES: Final = 1024 * 1024
WAIT_S: Final = 0.05
MOST_MESSAGES: Final = 10_000
MOST_BYTES: Final = 16 * 1024 * 1024
# The door answers after its window, and meanwhile the next batches must reach that window.
_UNDERWAY: Final = 8
# Requests of a batch, one for each sender. A batch of more senders is one request of none.
_MOST_PEERS: Final = 32
_QUIET_S: Final = 10.0

Message = tuple[bytes, str]  # and the address of its sender


class Gathering:
    """`decode` makes records of messages."""

    def __init__(self, door: Door, sender: SentBy, decode: Callable[[Sequence[Message]], Decoded]) -> None:
        self.dropped = 0
        self._door = door
        self._sender = sender
        self._decode = decode
        self._waiting: list[Message] = []
        self._bytes = 0
        self._underway: set[asyncio.Task[None]] = set()
        self._carried = 0  # messages underway
        self._timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._room.set()
        # While the door refuses one batch, the later ones stay behind it.
        self._open = asyncio.Event()
        self._open.set()
        self._said = (0, -_QUIET_S)  # dropped messages that the log knows of, and when it was told

    async def add(self, messages: Sequence[bytes], peer: str) -> None:
        """Waits for room, so that the caller reads no more meanwhile."""
        while not self._room.is_set():
            await self._room.wait()
        for message in messages:
            self._append(message, peer)

    def offer(self, message: bytes, peer: str) -> None:
        """Drops the message where there is no room."""
        if self._room.is_set():
            self._append(message, peer)
        else:
            self.count_dropped(1)

    def count_dropped(self, count: int) -> None:
        """So many messages are lost; the log says so now and then."""
        self.dropped += count
        metrics.messages_dropped(self._sender.protocol, count)
        before, when = self._said
        if self.dropped > before and time.monotonic() - when >= _QUIET_S:
            self._said = (self.dropped, time.monotonic())
            logger().warning("intake_dropped", protocol=self._sender.protocol, messages=self.dropped - before)

    async def close(self, within_s: float) -> None:
        """Hands over what is gathered; says in the log how many messages the door did not take in time."""
        deadline = time.monotonic() + within_s
        while (self._waiting or self._underway) and (left_s := deadline - time.monotonic()) > 0:
            self._send()
            await asyncio.wait(self._underway, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        lost = self._carried + len(self._waiting)
        for task in self._underway:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if lost:
            metrics.messages_dropped(self._sender.protocol, lost)
            logger().error("intake_lost", protocol=self._sender.protocol, messages=lost)

    def _append(self, message: bytes, peer: str) -> None:
        self._waiting.append((message, peer))
        self._bytes += len(message)
        if len(self._waiting) >= AT_ONCE or self._bytes >= AT_ONCE_BYTES:
            self._send()
        elif self._timer is None:
            self._timer = call_later(WAIT_S, "intake-gathering", self._send)

    def _send(self) -> None:
        """A batch leaves, if there is one and not too many are underway."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and len(self._underway) < _UNDERWAY:
            sizes = accumulate(len(message) for message, _ in self._waiting[:AT_ONCE])
            count = max(1, sum(size <= AT_ONCE_BYTES for size in sizes))
            batch = self._waiting[:count]
            del self._waiting[:count]
            self._bytes -= sum(len(message) for message, _ in batch)
            self._carried += len(batch)
            task = start_task("intake-carry", self._carry(batch))
            self._underway.add(task)
            task.add_done_callback(self._landed)
        if len(self._waiting) >= MOST_MESSAGES or self._bytes >= MOST_BYTES:
            self._room.clear()
        else:
            self._room.set()

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._underway.discard(task)
        if self._waiting:
            self._send()

    async def _carry(self, batch: list[Message]) -> None:
        by_peer: dict[str, list[Message]] = {}
        for message in batch:
            by_peer.setdefault(message[1], []).append(message)
        if len(by_peer) > _MOST_PEERS:
            by_peer = {"": batch}
        await asyncio.gather(*(self._carry_part(peer, part) for peer, part in by_peer.items()))

    async def _carry_part(self, peer: str, batch: list[Message]) -> None:
        sender = SentBy(protocol=self._sender.protocol, key=self._sender.key, peer=peer)
        try:
            await self._take(self._decode(batch), sender)
        except Exception:  # noqa: BLE001 - one batch must not end the listener
            logger().exception("intake_lost", protocol=sender.protocol, messages=len(batch))
        self._carried -= len(batch)

    async def _take(self, decoded: Decoded, sender: SentBy) -> None:
        await self._open.wait()
        while (wait_s := await self._try(decoded, sender)) is not None:
            if not self._open.is_set():
                await self._open.wait()
                continue
            self._open.clear()
            try:
                while wait_s is not None:
                    await asyncio.sleep(wait_s)
                    wait_s = await self._try(decoded, sender)
            finally:
                self._open.set()
            return

    async def _try(self, decoded: Decoded, sender: SentBy) -> float | None:
        return await seconds_to_next_try(self._door, decoded, identity=NO_IDENTITY, sender=sender)
