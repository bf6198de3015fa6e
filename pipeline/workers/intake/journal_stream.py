"""An upload of the systemd journal, taken in piece by piece while it arrives.

`systemd-journal-upload` sends all that lies behind its cursor in one request, which may be gigabytes. Each
piece ends between two entries, and is in before more is read: a full pipeline makes the sender wait, and
memory holds one piece. After a failure the sender repeats all of it. Entries that are in already are left
out by their cursors, as far as the identities of requests reach back.
"""

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from pipeline.records.pushed import PushedRecords
from pipeline.service.access.keys import SenderKey
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.journal import whole_entries
from pipeline.workers.intake.bodies import MAX_BODY, SLOW_S, Share, too_large
from pipeline.workers.intake.exchange import Exchange
from pipeline.workers.intake.identity import MOST_APART
from pipeline.workers.intake.refusals import Refusal, RequestRefused

PIECE: Final = 2 << 20  # bytes that make it worth to look for whole entries
PATIENCE_S: Final = 60.0  # for room, or for Redis; then the sender begins again
PAUSE_S: Final = 0.5
_EMPTY: Final = Decoded(records=PushedRecords([]), distinct=False)


class JournalExchange(Exchange):
    """An upload in pieces, where it is not compressed."""

    by_pieces = True

    async def _answered(
        self,
        request: Request,
        hints: Hints,
        key: SenderKey | None,
        encoding: str,
        share: Share,
        *,
        since: float,
    ) -> Response:
        if encoding != "identity":
            return await super()._answered(request, hints, key, encoding, share, since=since)
        upload = _Upload(self, hints, key, share)
        chunks = request.stream()
        while True:
            try:
                async with asyncio.timeout(SLOW_S):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise RequestRefused(
                    Refusal.SLOW, f"no part of the journal arrived within {SLOW_S:g} s; send again"
                ) from None
            if chunk is None:
                break
            await upload.add(chunk)
        await upload.end()
        return self.dialect.stored(b"", hints, _EMPTY)


class _Upload:
    """What has arrived of one upload and is not in yet."""

    def __init__(self, exchange: Exchange, hints: Hints, key: SenderKey | None, share: Share) -> None:
        self._take = exchange.taken
        self._hints, self._key, self._share = hints, key, share
        self._body = bytearray()
        self._look = PIECE  # the length from which whole entries are looked for
        self._begun = False  # a piece is in

    async def add(self, chunk: bytes) -> None:
        """Raises RequestRefused."""
        self._share.take(len(chunk))
        self._body += chunk
        if len(self._body) >= self._look:
            await self._cut()
            self._look = max(PIECE, 2 * len(self._body))
        if len(self._body) > MAX_BODY:  # one entry, or entries without cursors
            raise too_large(MAX_BODY)

    async def end(self) -> None:
        """Takes in the rest. Raises RequestRefused."""
        await self._cut()
        if self._body.strip(b"\n"):
            await self._patiently(bytes(self._body))

    async def _cut(self) -> None:
        """Takes in the whole entries at the beginning, and cuts them off."""
        while True:
            try:
                end = await asyncio.to_thread(whole_entries, bytes(self._body), MOST_APART)
            except Undecodable as exc:
                raise RequestRefused(Refusal.UNDECODABLE, str(exc)) from exc
            # Entries of a retry, cut in another way, are known by their cursors alone.
            if not end or b"__CURSOR=" not in self._body[:end]:
                return
            await self._patiently(bytes(self._body[:end]))
            del self._body[:end]
            self._share.give(end)

    async def _patiently(self, piece: bytes) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        while True:
            try:
                await self._take(piece, self._hints, self._key)
            except RequestRefused as refused:
                # The first piece may as well come again later.
                waits = self._begun and refused.kind in (Refusal.FULL, Refusal.AWAY)
                if not waits or loop.time() > until:
                    raise
            else:
                self._begun = True
                return
            await asyncio.sleep(PAUSE_S)
