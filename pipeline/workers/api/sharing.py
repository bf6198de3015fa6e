"""Answers that many open pages share: one question for all that ask within a moment."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Final, TypeVar

from pipeline.upkeep import call_later, start_awaited_task

KEPT: Final = 200  # answers; the oldest go
# Of the words of a question, such as the query of an address. A longer one is not shared.
MOST_QUESTION: Final = 4_096
FRESH_S: Final = 2.0
PAGES: Final = "pages"  # the name of questions whose answers are whole pages

T = TypeVar("T")


class SharedAnswers:
    """The answer to each question, for a moment. Pages that ask meanwhile wait for the same one.

    An answer that is no longer fresh goes, because it may be as large as a page of long lines."""

    def __init__(self) -> None:
        self._asked: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}

    async def ask(
        self, question: Hashable, ask: Callable[[], Coroutine[Any, Any, T]], *, fresh_s: float = FRESH_S
    ) -> T:
        """`question`: all that the answer depends on, with the workloads that the asker sees."""
        if len(str(question)) > MOST_QUESTION:
            return await ask()
        now = time.monotonic()
        known = self._asked.get(question)
        if known is None or now - known[0] > fresh_s or _failed(known[1]):
            task = start_awaited_task("shared-answer", ask())
            self._asked.pop(question, None)
            self._asked[question] = known = (now, task)
            task.add_done_callback(partial(self._answered, question, fresh_s))
            while len(self._asked) > KEPT:
                self._asked.pop(next(iter(self._asked)))
        found: T = await asyncio.shield(known[1])  # one page that is closed does not end it for the others
        return found

    def _answered(self, question: Hashable, fresh_s: float, task: asyncio.Future[Any]) -> None:
        call_later(fresh_s, "shared-answer", self._drop, question, task)

    def _drop(self, question: Hashable, task: asyncio.Future[Any]) -> None:
        if question in self._asked and self._asked[question][1] is task:
            del self._asked[question]

    def forget(self, name: str) -> None:
        """The next page asks again, and is written again: something has changed by our own hand."""
        for question in [q for q in self._asked if _name(q) in (name, PAGES)]:
            del self._asked[question]


def _name(question: Hashable) -> Hashable:
    return question[0] if isinstance(question, tuple) else question


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
