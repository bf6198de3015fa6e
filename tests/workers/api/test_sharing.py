"""Answers that many open pages share."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

from pipeline.errors import RedisUnavailable
from pipeline.service.access.keys import SenderKey, SenderKeys
from pipeline.settings import Settings
from pipeline.settings.listeners import Listener
from pipeline.workers.api import asking, changes, sharing
from pipeline.workers.api.access import Asker, Doorkeeper, while_admitted
from pipeline.workers.api.changes import ChangeFeed, SharedFeed
from pipeline.workers.api.problems import AskRefused
from pipeline.workers.api.sharing import PAGES, SharedAnswers

LISTENER = Listener.parse("http://127.0.0.1:4380", setting="api")


class Asked:
    """A question that counts how often it is asked, and waits for `go`."""

    def __init__(self) -> None:
        self.times = 0
        self.go = asyncio.Event()

    async def __call__(self) -> int:
        self.times += 1
        mine = self.times
        await self.go.wait()
        return mine


def with_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        return await asyncio.wait_for(work(), 20)

    return asyncio.run(run())


class SlowEngine:
    """Answers once `go` is set; `cancel` ends a question."""

    def __init__(self) -> None:
        self.go, self.cancelled = threading.Event(), False

    def cancel(self) -> None:
        self.cancelled = True
        self.go.set()

    def close(self) -> None:
        pass


class Tab:
    """A request whose client may go away."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


def test_a_client_that_goes_away_ends_its_own_question_and_no_shared_one(
    settings: Settings, client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[SlowEngine] = []

    def engine(*_: object, **_how: object) -> SlowEngine:
        engines.append(SlowEngine())
        return engines[-1]

    def ask(answers: Any) -> str:
        answers.go.wait(10)
        return "lines"

    monkeypatch.setattr(asking, "answers_of", engine)

    async def work() -> None:
        keys = SenderKeys(client, settings)
        api = asking.Api(client, settings, Doorkeeper(keys=keys, listener=LISTENER), keys)
        tab: Any = Tab()
        own = asyncio.create_task(api.stored(tab, ask))
        pages = [asyncio.create_task(api.shared_stored("q", ask)) for _ in range(2)]
        while len(engines) < 2:
            await asyncio.sleep(0.01)
        tab.gone.set()
        with pytest.raises(AskRefused, match="went away"):
            await own
        pages[0].cancel()
        await asyncio.wait(pages[:1])
        (shared,) = (one for one in engines if not one.cancelled)
        shared.go.set()
        assert await pages[1] == "lines"
        await api.close()

    with_loop(work)


def test_pages_that_ask_together_ask_once() -> None:
    async def work() -> None:
        shared, asked = SharedAnswers(), Asked()
        pages = [asyncio.create_task(shared.ask("q", asked)) for _ in range(50)]
        await asyncio.sleep(0)
        asked.go.set()
        assert await asyncio.gather(*pages) == [1] * 50
        assert await shared.ask("q", asked) == 1  # a moment later, too
        assert await shared.ask("other", asked) == 2
        assert await shared.ask("q", asked, fresh_s=-1) == 3  # it is old

    with_loop(work)


def test_a_page_that_is_closed_does_not_end_the_question_of_the_others() -> None:
    async def work() -> None:
        shared, asked = SharedAnswers(), Asked()
        closed, open_page = (asyncio.create_task(shared.ask("q", asked)) for _ in range(2))
        await asyncio.sleep(0)
        closed.cancel()
        await asyncio.sleep(0)
        asked.go.set()
        assert await open_page == 1 and closed.cancelled()

    with_loop(work)


def test_an_answer_that_failed_is_asked_for_again() -> None:
    async def work() -> None:
        shared = SharedAnswers()

        async def fails() -> int:
            raise OSError("no answer")

        async def works() -> int:
            return 1

        with pytest.raises(OSError, match="no answer"):
            await shared.ask("q", fails)
        assert await shared.ask("q", works) == 1

    with_loop(work)


def test_what_somebody_changed_is_asked_for_again() -> None:
    async def work() -> None:
        shared, asked = SharedAnswers(), Asked()
        asked.go.set()
        for question in ("marks", ("marks", "shop/*"), ("incidents", "shop/*")):
            await shared.ask(question, asked)
        shared.forget("marks")
        assert [await shared.ask(q, asked) for q in ("marks", ("marks", "shop/*"), ("incidents", "shop/*"))] == [
            4, 5, 3,
        ]  # fmt: skip
        assert await shared.ask((PAGES, "/"), asked) == 6
        shared.forget("incidents")
        assert await shared.ask((PAGES, "/"), asked) == 7  # a page shows everything

    with_loop(work)


def test_a_page_hears_of_the_changes_that_it_shows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(
        [{"marks": "1", "status": "1"}, {"marks": "1", "status": "2"}, {"marks": "2", "status": "3"}]
    )

    async def work() -> list[bytes]:
        feed = ChangeFeed(redis.Redis(), Settings())  # it connects with the first command, and none comes
        last: dict[str, str] = {}

        def look() -> dict[str, str]:
            last.update(next(looks, {}))
            return dict(last)

        monkeypatch.setattr(feed, "_look", look)
        stream = feed.follow("", {"marks"})
        heard = [await anext(stream) for _ in range(3)]
        await feed.close()
        return heard

    monkeypatch.setattr(changes, "LOOK_S", 0.01)
    _, begin, marks = with_loop(work)
    assert b"event: begin" in begin and b"event: marks" in marks


def test_no_more_answers_are_kept_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        shared, asked = SharedAnswers(), Asked()
        asked.go.set()
        for number in range(5):
            await shared.ask(number, asked)
        assert await shared.ask(4, asked) == 5 and await shared.ask(0, asked) == 6

    monkeypatch.setattr(sharing, "KEPT", 2)
    with_loop(work)


def test_a_stream_ends_with_its_key_and_goes_on_without_redis(
    client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = SenderKeys(client, settings)
    keys.add("follower", scopes=("read",))
    (key,) = keys.look()
    doorkeeper = Doorkeeper(
        keys=keys, listener=Listener(scheme="http", host="127.0.0.1", port=4380), own="own"
    )
    closed: list[str] = []

    async def pieces(name: str) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(3):
                yield str(number).encode()
                if number == 0 and name == "revoked":
                    keys.revoke("follower")
                    await asyncio.sleep(1.1)  # as long as an older ring of keys is taken
        finally:
            closed.append(name)

    async def heard(name: str, key: SenderKey) -> list[bytes]:
        stream = while_admitted(pieces(name), doorkeeper, Asker(name=name, key=key))
        return [piece async for piece in stream]

    assert with_loop(lambda: heard("calm", key)) == [b"0", b"1", b"2"]
    assert with_loop(lambda: heard("revoked", key)) == [b"0"]
    own = replace(key, digest="own")
    assert with_loop(lambda: heard("own", own)) == [b"0", b"1", b"2"]

    async def gone() -> None:
        raise RedisUnavailable("no Redis")

    monkeypatch.setattr(keys, "ring", gone)
    assert with_loop(lambda: heard("without Redis", key)) == [b"0", b"1", b"2"]
    assert closed == ["calm", "revoked", "own", "without Redis"]


# ---- streams -------------------------------------------------------------------------------------


class _Bell(SharedFeed):
    """A feed of numbers that nothing looks for."""

    def __init__(self) -> None:
        super().__init__("bell")
        self.rung = 0

    async def hears(self, since: int) -> bool:
        return await self._until(lambda: self.rung > since)

    def ring(self) -> None:
        self.rung += 1
        self._wake()

    def _look(self) -> int:
        return self.rung

    def _is_new(self, found: int) -> bool:
        return True

    def _forget(self) -> None:
        self.rung = 0


def test_clients_that_go_away_while_news_come_keep_nobody_else_from_hearing() -> None:
    async def lives() -> bool:
        bell = _Bell()
        for steps in range(12):
            leaving = [asyncio.create_task(bell.hears(bell.rung)) for _ in range(3)]
            for _ in range(5):  # until all wait
                await asyncio.sleep(0)
            bell.ring()
            for _ in range(steps % 4):
                await asyncio.sleep(0)
            for task in leaving:
                task.cancel()
            await asyncio.sleep(0)
            for task in leaving:
                task.cancel()
            await asyncio.wait(leaving, timeout=1)
        staying = asyncio.create_task(bell.hears(bell.rung))
        await asyncio.sleep(0)
        bell.ring()
        return await asyncio.wait_for(staying, 2)

    assert asyncio.run(lives())


def test_an_answer_that_is_not_fresh_is_forgotten_although_nobody_asks_again() -> None:
    async def work() -> None:
        shared, asked = SharedAnswers(), Asked()
        asked.go.set()
        assert await shared.ask("q", asked, fresh_s=0.02) == 1
        assert len(shared._asked) == 1
        async with asyncio.timeout(10):
            while shared._asked:
                await asyncio.sleep(0.01)

    with_loop(work)


def test_an_answer_outlives_the_one_before_it() -> None:
    """The end of an older answer takes no newer one with it."""

    async def work() -> None:
        shared, asked = SharedAnswers(), Asked()
        asked.go.set()
        assert await shared.ask("q", asked, fresh_s=0.02) == 1
        shared.forget("q")
        assert await shared.ask("q", asked, fresh_s=60) == 2
        await asyncio.sleep(0.1)
        assert await shared.ask("q", asked, fresh_s=60) == 2

    with_loop(work)


def test_a_question_of_many_words_is_answered_and_not_kept() -> None:
    async def work() -> None:
        shared, asked = SharedAnswers(), Asked()
        asked.go.set()
        question = ("lines", "x" * sharing.MOST_QUESTION)
        assert [await shared.ask(question, asked), await shared.ask(question, asked)] == [1, 2]
        assert not shared._asked

    with_loop(work)
