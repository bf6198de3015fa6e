"""The Open Inference Protocol, version 2, over HTTP. A key sees the models of its tenant, and no others."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
import redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipeline import __version__
from pipeline.errors import RedisUnavailable
from pipeline.gpu.homes import ServeState, serve_state
from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.service.access.keys import INFER, SenderKey, SenderKeys, authorization_texts
from pipeline.workers.intake.bodies import Room, receive_body
from pipeline.workers.intake.refusals import AGAIN, RETRY_AFTER_S, STATUS, RequestRefused
from pipeline.workers.serve.desk import DEADLINE_S, LONGEST_S, ModelDesk, ModelQuestion, ServeRefused
from pipeline.workers.serve.relay import RELAYED, RelayedAnswer
from pipeline.workers.serve.tensors import BINARY_TYPE, HEADER_LENGTH, JSON_TYPE, InferAnswer, timeout_us

REMEDY: Final = "; `logweir keys add NAME --scope infer --tenant TENANT` makes one"
Handler = Callable[[Request], Awaitable[Response]]


class ServeApp:
    """The routes over one desk."""

    def __init__(self, desk: ModelDesk, keys: SenderKeys) -> None:
        self.desk, self.keys = desk, keys
        self.room = Room()

    def routes(self) -> Starlette:
        """The application of ASGI."""
        one = "/v2/models/{name}"
        version = one + "/versions/{version}"
        routes = [
            Route("/v2/health/live", self._route(self.live)),
            Route("/v2/health/ready", self._route(self.ready)),
            Route("/v2", self._route(self.server)),
            Route("/v2/repository/index", self._route(self.index), methods=["POST"]),
        ]
        for path in (one, version):
            routes += [
                Route(path, self._route(self.metadata)),
                Route(f"{path}/ready", self._route(self.model_ready)),
                Route(f"{path}/infer", self._route(self.infer), methods=["POST"]),
            ]
        elsewhere = self._route(self.elsewhere)
        every = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        return Starlette(routes=[*routes, Route("/{path:path}", elsewhere, methods=every)])

    async def live(self, _request: Request) -> Response:
        return _json({"live": True})

    async def ready(self, _request: Request) -> Response:
        """Ready with a lease and a Redis; without models too."""
        view = await self.desk.look()
        own = next((node for node in view.nodes if node.name == self.desk.host.name), None)
        if own is None or not own.lease_id:
            raise ServeRefused(
                503, f"{self.desk.host.name} {self.desk.host.why or 'has no lease'}", retry_after_s=5
            )
        return _json({"ready": True})

    async def server(self, _request: Request) -> Response:
        return _json({"name": "logweir", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def index(self, request: Request) -> Response:
        """All models of the tenant."""
        tenant = (await self._key(request)).tenant
        view = await self.desk.look()
        found = []
        for model in view.models:
            if model.tenant == tenant:
                state, why = serve_state(view, model)
                words = {
                    "name": model.name,
                    "version": str(model.version),
                    "state": _STATES[state],
                    "reason": why,
                }
                found.append(words)
        return _json(found)

    async def model_ready(self, request: Request) -> Response:
        """Whether a copy answers, on any node."""
        key = await self._key(request)
        model = await self.desk.find(
            key.tenant, request.path_params["name"], request.path_params.get("version")
        )
        view = await self.desk.look()
        if view.answering(model):
            return _json({"name": model.name, "ready": True})
        raise ServeRefused(400, f"{model.name} is not ready: {serve_state(view, model)[1]}")

    async def metadata(self, request: Request) -> Response:
        question = await self._question(request, time.monotonic() + DEADLINE_S, method="GET", path="")
        return _response(await self.desk.metadata(question))

    async def infer(self, request: Request) -> Response:
        """One inference, counted."""
        began, outcome = time.monotonic(), "failed"
        try:
            answer = await self._infer(request, began)
            outcome = "relayed" if isinstance(answer, RelayedAnswer) else "answered"
            return _response(answer)
        except RequestRefused:
            outcome = "refused"
            raise
        except ServeRefused as exc:
            outcome = _OUTCOMES.get(exc.status, "refused" if exc.status < 500 else "failed")
            raise
        finally:
            metrics.inference_ended(outcome, time.monotonic() - began)

    async def _infer(self, request: Request, began: float) -> InferAnswer | RelayedAnswer:
        headers = request.headers
        length = headers.get(HEADER_LENGTH)
        if length is not None and not (length.isascii() and length.isdigit() and len(length) < 12):
            raise ServeRefused(
                400, f"{HEADER_LENGTH} {length[:40]!r} is no number of bytes; send the length of the JSON"
            )
        header = None if length is None else int(length)
        question = await self._question(request, began + DEADLINE_S)  # who asks, before a body is read
        with self.room.shared() as share:
            body = await receive_body(
                request.stream(), encoding=headers.get("content-encoding", "identity").lower(), share=share
            )
            wanted_us = await asyncio.to_thread(timeout_us, body, header)
            end = began + (DEADLINE_S if wanted_us is None else min(LONGEST_S, wanted_us / 1e6))
            question = ModelQuestion(
                model=question.model, headers=question.headers, body=body, relayed=question.relayed, end=end
            )
            return await self.desk.infer(question, header)

    async def elsewhere(self, request: Request) -> Response:
        known = "/v2, /v2/health/ready, /v2/models/NAME and /v2/models/NAME/infer (POST)"
        raise ServeRefused(
            404, f"there is no {request.method} {request.url.path[:200]!r} here; there are {known}"
        )

    async def _question(
        self, request: Request, end: float, *, method: str = "POST", path: str = "/infer"
    ) -> ModelQuestion:
        key = await self._key(request)
        model = await self.desk.find(
            key.tenant, request.path_params["name"], request.path_params.get("version")
        )
        return ModelQuestion(
            model=model,
            headers=dict(request.headers),
            method=method,
            path=path,
            relayed=RELAYED in request.headers,
            end=end,
        )

    async def _key(self, request: Request) -> SenderKey:
        """Raises ServeRefused."""
        texts = list(authorization_texts(request.headers.get("authorization", "")))
        if not texts:
            raise ServeRefused(401, f"this needs a key, in the header `Authorization: Bearer KEY`{REMEDY}")
        try:
            found = (await self.keys.ring()).find(texts)
        except (RedisUnavailable, redis.RedisError):
            raise ServeRefused(
                503, "Redis does not answer, so no key can be checked", retry_after_s=1
            ) from None
        if found is None:
            raise ServeRefused(
                401, "the key is not known here or has expired; `logweir keys list` shows the others"
            )
        if not found.may(INFER) or not found.tenant:
            raise ServeRefused(
                403, f"the key {found.name!r} may not ask models, only {', '.join(found.scopes)}{REMEDY}"
            )
        return found

    def _route(self, handler: Handler) -> Handler:
        """Faults in the protocol's shape."""

        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except ServeRefused as exc:
                return _json({"error": str(exc)}, exc.status, exc.headers)
            except RequestRefused as exc:
                again = {"Retry-After": str(RETRY_AFTER_S)} if exc.kind in AGAIN else {}
                return _json({"error": str(exc)}, STATUS[exc.kind], again)
            except asyncio.CancelledError:
                raise
            except Exception:  # noqa: BLE001 - the edge of a request
                logger(path=request.url.path[:200]).exception("serve.request_failed")
                return _json({"error": "this is a fault of the server; its log says more"}, 500)

        return endpoint


_OUTCOMES: Final = {503: "unready", 504: "late"}
_STATES: Final = {ServeState.READY: "READY", ServeState.LOADING: "LOADING", ServeState.PENDING: "UNAVAILABLE"}


def _json(facts: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(facts), status, headers, media_type=JSON_TYPE)


def _response(answer: InferAnswer | RelayedAnswer | dict[str, Any]) -> Response:
    if isinstance(answer, RelayedAnswer):
        return Response(answer.body, answer.status, dict(answer.headers))
    if isinstance(answer, InferAnswer):
        if answer.header is None:
            return Response(answer.body, media_type=JSON_TYPE)
        return Response(answer.body, headers={HEADER_LENGTH: str(answer.header)}, media_type=BINARY_TYPE)
    return _json(answer)
