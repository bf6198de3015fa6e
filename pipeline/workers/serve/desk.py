"""Answers requests to models: here, on another node, or not now and why."""

import asyncio
import http.client
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import redis

from pipeline.errors import BadInput, DeviceFailed, ModelUnavailable, RedisUnavailable
from pipeline.gpu.homes import Pending, choose_home, serve_state
from pipeline.gpu.placing import LoadState
from pipeline.gpu.served import ServedModel, ServeNode
from pipeline.logs import logger
from pipeline.workers.serve.host import ModelHost
from pipeline.workers.serve.relay import MOVED, Relay, RelayedAnswer
from pipeline.workers.serve.runners import Runner
from pipeline.workers.serve.tensors import (
    InferAnswer,
    check_inputs,
    read_request,
    wanted_outputs,
    write_answer,
)

THREADS: Final = 4  # requests that compute at a time
MOST_WAITING: Final = 64  # beyond them: a client that is told at once can go elsewhere
RELAYS: Final = 32  # requests to other nodes at a time
DEADLINE_S: Final = 30.0
LONGEST_S: Final = 300.0  # that a client may ask for
POLL_S: Final = 0.1
AWAY_S: Final = 2.0  # a node that did not answer gets no request for so long
TRIES: Final = 3  # copies that a request is sent to

T = TypeVar("T")


class ServeRefused(Exception):
    """A request that is not answered with a tensor. `status` is that of HTTP."""

    def __init__(self, status: int, sentence: str, *, retry_after_s: int = 0, moved: bool = False) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
        if moved:
            self.headers[MOVED] = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestion:
    """One request to a model. `path`: behind `/v2/models/NAME/versions/N`."""

    model: ServedModel
    headers: Mapping[str, str]
    body: bytes = b""
    method: str = "POST"
    path: str = "/infer"
    relayed: bool = False
    end: float = field(default_factory=lambda: time.monotonic() + DEADLINE_S)

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()


class ModelDesk:
    """One per process."""

    def __init__(self, host: ModelHost) -> None:
        self.host = host
        self.relay = Relay()
        self._threads = ThreadPoolExecutor(THREADS, "serve-infer")
        self._relays = ThreadPoolExecutor(RELAYS, "serve-relay")
        self._waiting = 0
        self._away: dict[str, float] = {}  # node -> monotonic, until when
        self._wanted: dict[str, float] = {}  # field -> monotonic, of the last wish

    async def find(self, tenant: str, name: str, version: str | None) -> ServedModel:
        """The model that a request means: without a version the newest that answers. Raises ServeRefused."""
        found = self._versions(self.host.view, tenant, name, version)
        if not found:
            found = self._versions(await self.look(), tenant, name, version)
        if not found:
            which = name[:80] if version is None else f"{name[:80]} of version {version[:20]}"
            raise ServeRefused(
                404, f"{tenant} has no model {which}; POST /v2/repository/index lists those there are"
            )
        view = self.host.view
        return next((one for one in found if view.answering(one) or self._here(one)), found[0])

    async def look(self) -> Pending:
        """A new view, beside the event loop. Raises ServeRefused."""
        try:
            return await asyncio.to_thread(self.host.look)
        except (RedisUnavailable, redis.RedisError):
            raise ServeRefused(503, "Redis does not answer; ask again", retry_after_s=1) from None

    async def infer(self, question: ModelQuestion, header: int | None) -> InferAnswer | RelayedAnswer:
        """Raises ServeRefused."""

        def work(runner: Runner) -> InferAnswer:
            request = read_request(question.body, header)
            check_inputs(request, runner.inputs)
            specs = wanted_outputs(request, runner.outputs)
            found = runner.run(request.inputs, [spec.name for spec in specs])
            outputs = [(spec, found[spec.name]) for spec in specs]
            return write_answer(request, outputs, model=question.model.name, version=question.model.version)

        return await self._answer(question, work)

    async def metadata(self, question: ModelQuestion) -> dict[str, Any] | RelayedAnswer:
        """Name, versions, platform, inputs and outputs. Raises ServeRefused."""
        model = question.model
        versions = self.host.view.versions(model.tenant, model.name)

        def work(runner: Runner) -> dict[str, Any]:
            return {
                "name": model.name,
                "versions": [str(one.version) for one in reversed(versions)],
                "platform": runner.platform,
                "inputs": [spec.facts() for spec in runner.inputs],
                "outputs": [spec.facts() for spec in runner.outputs],
            }

        return await self._answer(question, work)

    def close(self) -> None:
        """Takes no further work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._relays.shutdown(wait=False, cancel_futures=True)
        self.relay.close()

    async def _answer(self, question: ModelQuestion, work: Callable[[Runner], T]) -> T | RelayedAnswer:
        tries = 0
        while True:
            node = await self._place(question)
            tries += 1
            try:
                if node is None:
                    return await self._compute(question, work)
                answer = await self._send(question, node)
                if MOVED.lower() not in map(str.lower, answer.headers):
                    return answer
                self._away[node.name] = time.monotonic() + POLL_S
            except ModelUnavailable as exc:  # it was unloaded a moment ago
                if question.relayed or tries >= TRIES:
                    raise ServeRefused(503, str(exc), retry_after_s=1, moved=True) from exc
            except (OSError, http.client.HTTPException) as exc:
                assert node is not None  # noqa: S101 - nothing else reads a socket
                self._away[node.name] = time.monotonic() + AWAY_S
                logger(node=node.name).warning("serve.node_away", why=str(exc))
                if tries >= TRIES or question.left_s <= 0:
                    raise ServeRefused(
                        503,
                        f"{node.name} does not answer ({exc}); its copy counts until its lease ends",
                        retry_after_s=1,
                    ) from exc
            if tries >= TRIES:
                raise ServeRefused(503, f"{question.model.name} is being moved; ask again", retry_after_s=1)

    async def _place(self, question: ModelQuestion) -> ServeNode | None:
        """The node whose copy answers, None for this one; waits for one that comes. Raises ServeRefused."""
        model, view = question.model, self.host.view
        while True:
            if self._here(model):
                return None
            if question.relayed:
                raise ServeRefused(
                    503, f"{model.name} is not loaded on {self.host.name}", retry_after_s=1, moved=True
                )
            now = time.monotonic()
            nodes = [
                node for entry in view.answering(model)
                if (node := view.holder(entry)) is not None and node.name != self.host.name
                and self._away.get(node.name, 0.0) <= now
            ]  # fmt: skip
            if nodes:
                return random.choice(nodes)  # noqa: S311 - to spread load
            await self._want(model)
            view = await self.look()
            self._check_hope(view, question)
            await asyncio.sleep(min(POLL_S, max(question.left_s, 0.0)))

    def _check_hope(self, view: Pending, question: ModelQuestion) -> None:
        """Raises ServeRefused where no copy comes in time."""
        model = question.model
        if model not in view.models:
            raise ServeRefused(404, f"{model.name} has been removed")
        coming = any(one.state is LoadState.LOADING for one in view.copies_of(model))
        ready = bool(view.answering(model))
        _, why = serve_state(view, model)
        if question.left_s <= 0:
            raise ServeRefused(
                504, f"{model.name} was not ready in time: {why or 'its node does not answer'}"
            )
        if not (coming or ready or choose_home(view, model).uuid):
            raise ServeRefused(503, f"{model.name} is not ready: {why}", retry_after_s=5)
        if ready:  # on a node that did not answer a moment ago
            away = [node.name for entry in view.answering(model) if (node := view.holder(entry)) is not None]
            if all(self._away.get(name, 0.0) > time.monotonic() for name in away):
                raise ServeRefused(
                    503,
                    f"{', '.join(away)} does not answer; its copy counts until its lease ends",
                    retry_after_s=1,
                )

    async def _want(self, model: ServedModel) -> None:
        now = time.monotonic()
        if now - self._wanted.get(model.field, float("-inf")) < 1.0:
            return
        if len(self._wanted) > 10_000:
            self._wanted.clear()
        self._wanted[model.field] = now
        try:
            await asyncio.to_thread(self.host.served.want, model)
        except (RedisUnavailable, redis.RedisError):
            raise ServeRefused(503, "Redis does not answer; ask again", retry_after_s=1) from None
        self.host.wake()

    async def _compute(self, question: ModelQuestion, work: Callable[[Runner], T]) -> T:
        late = ServeRefused(504, f"{question.model.name} did not answer in time; ask for less at a time")
        if question.left_s <= 0:  # its sender no longer waits, so no thread works for it
            raise late
        if self._waiting >= MOST_WAITING + THREADS:
            raise ServeRefused(503, f"{MOST_WAITING} requests wait already; ask again", retry_after_s=1)
        self._waiting += 1
        loop = asyncio.get_running_loop()
        running = self._threads.submit(self._work, question, work)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the process ends
                loop.call_soon_threadsafe(self._count_off)

        running.add_done_callback(ended)
        future = asyncio.wrap_future(running)
        future.add_done_callback(_read)
        try:
            return await asyncio.wait_for(asyncio.shield(future), max(question.left_s, 0.001))
        except TimeoutError:
            running.cancel()  # one that has begun goes on, and counts until it ends
            raise late from None
        except BadInput as exc:
            raise ServeRefused(400, str(exc)) from exc
        except DeviceFailed as exc:
            raise ServeRefused(500, str(exc)) from exc
        except RedisUnavailable as exc:
            raise ServeRefused(503, f"{exc}; ask again", retry_after_s=1) from exc

    def _count_off(self) -> None:
        self._waiting -= 1

    def _work(self, question: ModelQuestion, work: Callable[[Runner], T]) -> T:
        placement = self.host.placement
        if placement is None:
            raise ModelUnavailable(f"{question.model.name} has gone with its lease")
        with placement.request(question.model.tenant, question.model.model):
            runner = self.host.loader.runners.get(question.model.model.key)
            if runner is None:
                raise ModelUnavailable(f"{question.model.name} has gone with its lease")
            return work(runner)

    async def _send(self, question: ModelQuestion, node: ServeNode) -> RelayedAnswer:
        path = f"/v2/models/{question.model.name}/versions/{question.model.version}{question.path}"

        def send() -> RelayedAnswer:
            return self.relay.send(
                node.url, question.method, path, question.body, question.headers,
                by=self.host.name, timeout_s=max(question.left_s, 0.1),
            )  # fmt: skip

        future = asyncio.get_running_loop().run_in_executor(self._relays, send)
        future.add_done_callback(_read)
        try:
            return await asyncio.wait_for(asyncio.shield(future), max(question.left_s, 0.1))
        except TimeoutError:
            raise ServeRefused(504, f"{node.name} did not answer in time; ask for less at a time") from None

    def _here(self, model: ServedModel) -> bool:
        placement = self.host.placement
        return placement is not None and placement.here(model.model.key) is not None

    @staticmethod
    def _versions(view: Pending, tenant: str, name: str, version: str | None) -> list[ServedModel]:
        found = view.versions(tenant, name)
        return found if version is None else [one for one in found if str(one.version) == version]


def _read(future: "asyncio.Future[Any]") -> None:
    """Takes the fault of a request that came too late and has no reader any more."""
    if not future.cancelled():
        future.exception()
