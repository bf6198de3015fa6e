"""Where a training stands in the documents that it reads: a sample so far, and a place.

A checkpoint is an object of the store, so a trainer on another machine goes on with it. It belongs to one
training and is followed by that of its retry. It holds counts of masked lines and no documents.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from pipeline.errors import BadPayload, StoreUnavailable, TooNew
from pipeline.logs import logger
from pipeline.records.wire import Codec
from pipeline.store.objects import Objects
from pipeline.training.sampling import SamplerState

PREFIX: Final = "trainings/"
EVERY_S: Final = 15.0
SHARE: Final = 0.1  # of the time of reading that checkpoints may take
FORGOTTEN_S: Final = 7 * 86_400.0  # a retry pauses for an hour at most


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Behind the documents that were read: sort values of the last one, and those that have the same."""

    after: list[int]
    there: list[tuple[str, str]]  # (index, id)
    formats: list[str] = msgspec.field(default_factory=list)  # of the messages
    documents: int = 0
    without_message: int = 0


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """`question` tells one query, masks and seed from others."""

    question: str
    place: Place
    sample: SamplerState
    complete: bool  # nothing is left to read


CHECKPOINTS: Final = Codec(Checkpoint, version=1, what="a checkpoint of a training", newer=TooNew)


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one training. A store that fails costs the checkpoint, not the training."""

    objects: Objects
    request_id: str
    retry_of: str
    question: str
    _next: float = 0.0

    def taken_over(self) -> Checkpoint | None:
        """The checkpoint of this training, else of the one that it repeats, which becomes its own.

        None without one, and for one of another question."""
        for name in filter(None, (self.request_id, self.retry_of)):
            try:
                blob = self.objects.get(_key(name))
                known = None if blob is None else CHECKPOINTS.unpack(blob)
            except (StoreUnavailable, BadPayload, TooNew) as exc:
                logger(request=name).warning("training.checkpoint_unread", why=str(exc))
                continue
            if known is not None and known.question == self.question:
                if name != self.request_id:
                    self.write(known.place, known.sample, complete=known.complete)
                return known
        return None

    @property
    def due(self) -> bool:
        """Whether it is time to write one."""
        if not self._next:
            self._next = time.monotonic() + EVERY_S
        return time.monotonic() >= self._next

    def write(self, place: Place, sample: SamplerState, *, complete: bool) -> None:
        """Replaces the one before."""
        began = time.monotonic()
        value = Checkpoint(question=self.question, place=place, sample=sample, complete=complete)
        try:
            self.objects.put(_key(self.request_id), CHECKPOINTS.pack(value))
        except StoreUnavailable as exc:
            logger(request=self.request_id).warning("training.checkpoint_lost", why=str(exc))
        now = time.monotonic()
        self._next = now + max(EVERY_S, (now - began) / SHARE)

    def remove(self) -> None:
        """After the training, and those that no retry came for."""
        with suppress(StoreUnavailable):
            for name in filter(None, (self.request_id, self.retry_of)):
                self.objects.delete(_key(name))
            for one in list(self.objects.found(PREFIX)):
                if time.time() - one.changed > FORGOTTEN_S:
                    self.objects.delete(one.key)


def _key(request_id: str) -> str:
    return f"{PREFIX}{request_id}"
