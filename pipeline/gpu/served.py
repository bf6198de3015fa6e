"""Models that nodes serve on leases of the pool: their records, and the nodes that load them.

A model is one record in Redis for each of its versions. Its file lies in the store (served_files.py). A node
is one process of the role `serve` with a lease (workers/serve/). It reports once a second what it may load.
Where models go is decided in homes.py, by every node alike.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeVar, cast

import redis

from pipeline.errors import BadInput, BadPayload, NotFound
from pipeline.gpu.leasing import wire
from pipeline.gpu.placing import Model
from pipeline.logs import logger
from pipeline.redis.connection import answering, now_ms
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

MOST_RECORDS: Final = 1_000  # versions of models: a node reads all of them once a second
KEPT_VERSIONS: Final = 3  # of one name; a further one removes the oldest
WANTED_MS: Final = 30_000  # a request, or a new version, asks for a model for so long
FORGOTTEN_MS: Final = 3_600_000  # a node that was killed is shown for so long
MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")

T = TypeVar("T")


class ModelFormat(StrEnum):
    """The contents of a model's file."""

    ONNX = "onnx"
    LOGWEIR = "logweir"  # a directory of `logweir models export`, as one archive


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One version of a model. `memory_mib`: what one copy may take of a lease."""

    tenant: str
    name: str
    version: int = 0  # given by `put`
    format: ModelFormat
    memory_mib: int
    replicas: int = 1
    sha256: str  # of its file in the store
    size: int  # bytes
    by: str = ""  # who put it there
    put_ms: int = 0  # Redis clock

    @property
    def field(self) -> str:
        return f"{self.tenant}/{self.name}/{self.version}"

    @property
    def model(self) -> Model:
        """The model as a placement knows it. Another file of the same version is another one."""
        return Model(
            name=f"{self.name}@{self.version}.{self.sha256[:8]}",
            tenant=self.tenant,
            memory_mib=self.memory_mib,
            replicas=self.replicas,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRoom:
    """The memory of one device of a lease that models may take."""

    uuid: str
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFault:
    """A load that failed on a node; it is tried again there from `until_ms` on."""

    model: str  # ServedModel.field
    why: str
    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeNode:
    """A process of the role `serve`, or one that scores (`scores`), as it reported last."""

    name: str  # of the process, unique in the pool
    node: str  # its machine
    url: str  # where other nodes send requests
    lease_id: str = ""
    rooms: tuple[ServeRoom, ...] = ()
    formats: tuple[ModelFormat, ...] = ()  # that its packages can load
    faults: tuple[LoadFault, ...] = ()
    why: str = ""  # why it loads nothing now
    beat_ms: int = 0  # Redis clock
    scores: bool = False  # it loads our own models alone (own_models.py), and answers no requests


class ServedModels:
    """All served models of one pool, and their nodes. Every method raises RedisUnavailable."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        keys = Keys(settings.redis.key_prefix)
        self._served = keys.gpu("served")
        self._nodes = keys.gpu("serve_nodes")
        self._wanted = keys.gpu("wanted")

    def put(self, model: ServedModel) -> tuple[ServedModel, list[ServedModel]]:
        """A new version of a model, and the versions that it removed. Raises BadInput for a full registry."""
        now = now_ms(self.client)
        while True:
            known = self.all()
            if len(known) >= MOST_RECORDS:
                raise BadInput(
                    f"{MOST_RECORDS:,} versions of models are served; remove some with "
                    "`logweir gpu models remove NAME`"
                )
            of_name = [one for one in known if (one.tenant, one.name) == (model.tenant, model.name)]
            version = max((one.version for one in of_name), default=0) + 1
            new = replace(model, version=version, put_ms=now)
            with answering():
                made = self.client.hsetnx(self._served, new.field, wire.encode(new))
            if made:
                break  # else another command put a version at the same time
        old = sorted(of_name, key=lambda one: one.version)[: max(0, len(of_name) + 1 - KEPT_VERSIONS)]
        self._drop(old)
        self.want(new)
        return new, old

    def remove(self, tenant: str, name: str, version: int | None = None) -> list[ServedModel]:
        """Removes a version, or all of them. Nodes unload them within a second or two. Raises NotFound."""
        found = [
            one for one in self.all()
            if (one.tenant, one.name) == (tenant, name) and version in (None, one.version)
        ]  # fmt: skip
        if not found:
            which = name[:80] if version is None else f"{name[:80]} of version {version}"
            raise NotFound(f"{tenant} has no model {which}; `logweir gpu models` shows those there are")
        self._drop(found)
        return found

    def all(self) -> list[ServedModel]:
        """By tenant, name and version. An unreadable record is left out."""
        found = self._read(self._served, ServedModel)
        return sorted(found, key=lambda one: (one.tenant, one.name, one.version))

    def count(self) -> int:
        """The number of records, the unreadable ones too."""
        with answering():
            return int(self.client.hlen(self._served))

    def want(self, model: ServedModel) -> None:
        """Marks a model that is not ready as asked for: idle ones may make room for it."""
        now = now_ms(self.client)
        pipe = self.client.pipeline(transaction=False)
        pipe.zadd(self._wanted, {model.field: now})
        pipe.zremrangebyscore(self._wanted, "-inf", now - WANTED_MS)
        with answering():
            pipe.execute()

    def fulfil(self, model: ServedModel) -> None:
        """A copy is ready, so the wish has been met: it displaces nothing any more."""
        with answering():
            self.client.zrem(self._wanted, model.field)

    def wanted(self) -> dict[str, int]:
        """The models that were asked for lately, by `ServedModel.field`: when last."""
        with answering():
            found = self.client.zrangebyscore(
                self._wanted, now_ms(self.client) - WANTED_MS, "+inf", withscores=True
            )
        return {member.decode(): int(at) for member, at in cast("list[tuple[bytes, float]]", found)}

    def report(self, node: ServeNode) -> None:
        """A node lives, and may load this."""
        with answering():
            self.client.hset(self._nodes, node.name, wire.encode(node))

    def leave(self, name: str) -> None:
        """A node ends."""
        with answering():
            self.client.hdel(self._nodes, name)

    def nodes(self) -> list[ServeNode]:
        """By name, also those that are silent; those that have been so for an hour are forgotten."""
        found = self._read(self._nodes, ServeNode)
        old = now_ms(self.client) - FORGOTTEN_MS
        for node in found:
            if node.beat_ms < old:
                self.leave(node.name)
        return sorted((node for node in found if node.beat_ms >= old), key=lambda node: node.name)

    def _drop(self, models: list[ServedModel]) -> None:
        if models:
            with answering():
                self.client.hdel(self._served, *(one.field for one in models))

    def _read(self, key: str, kind: type[T]) -> list[T]:
        with answering():
            texts = cast("list[bytes]", self.client.hvals(key))
        found = []
        for text in texts:
            try:
                found.append(wire.read_json(kind, text))
            except BadPayload as exc:  # of a newer build, or damaged: it must not stop all the others
                logger().warning("serve.record_unreadable", why=str(exc))
        return found


def checked_model_name(name: str) -> str:
    """The name itself. Raises BadInput for one that cannot be part of an address."""
    if not MODEL_NAME.fullmatch(name):
        raise BadInput(
            f"{name[:80]!r} is no name of a model; use letters, digits, dots, dashes and underscores, at most 63"
        )
    return name
