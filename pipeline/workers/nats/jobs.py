"""Trainings and workloads as Opni's services ask for them, and what they are told.

Redis keeps the jobs, so that a gateway that is killed tells their ends all the same. Each word has an id, so
subscribers hear it once over JetStream.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from pipeline.controller.training_status import Status, TrainingState
from pipeline.controller.trainings import Trainings
from pipeline.controller.watchlist import NestedWorkloads as Workloads
from pipeline.controller.watchlist import Watchlist, covers, patterns_of
from pipeline.errors import BadInput, SourceUnavailable, TrainingsFull
from pipeline.ledger.ledger import Ledger
from pipeline.logs import logger
from pipeline.nats import subjects
from pipeline.nats.connection import NatsConnection
from pipeline.nats.streams import publish_all
from pipeline.producer import Producer
from pipeline.records.batch import digest
from pipeline.redis.connection import answering, now_ms, text_map
from pipeline.redis.keys import Keys
from pipeline.service.trainings import TrainingAsked, request_training

T = TypeVar("T")
BUCKET: Final = "model-training-parameters"  # the KV bucket of Opni
LAST_TRAINED: Final = "lastModelTrained"
MODELS: Final = "logweir"  # `bucket` of model_update: Opni's inference loads models of its own bucket alone
BY: Final = "opni"  # in the audit log
SUBMITTED, RESET = b"training job submitted", b"model reset"
PUBLISH_S: Final = 10.0
# Fields of the hash beside the ids of trainings.
_PARAMETERS, _LIVE = "=parameters", "=live"


class Parameters(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The workloads that Opni's users chose, and those of the last training."""

    uuid: str = ""
    workloads: Workloads = msgspec.field(default_factory=dict)
    trained: Workloads = msgspec.field(default_factory=dict)


class Asked(msgspec.Struct, kw_only=True):
    """The message of `train_model`. Without workloads it asks for a reset."""

    uuid: str = ""
    workloads: Workloads | None = None


class TrainJob(msgspec.Struct, kw_only=True):
    """The message of `train`, as far as it is read. The query is of Opni's index and is not asked."""

    parameters: Asked


class InternalJob(msgspec.Struct, kw_only=True):
    """The message of `gpu_service_training_internal`."""

    payload: TrainJob


class Jobs:
    """Every method raises RedisUnavailable and SourceUnavailable."""

    def __init__(self, connection: NatsConnection, producer: Producer) -> None:
        self.connection = connection
        self.settings = producer.settings
        self.client = producer.ledger.client
        self.ledger: Ledger = producer.ledger
        self.key = Keys(self.settings.redis.key_prefix).nats_jobs
        self.trainings = Trainings(self.client, self.settings)
        self.watchlist = Watchlist(self.client, self.settings)
        self.log = logger(role="nats")

    # ---- what is asked ----------------------------------------------------------------------------

    def parameters(self) -> Parameters:
        """The workloads as they were asked for last."""
        with answering():
            raw: Any = self.client.hget(self.key, _PARAMETERS)
        return msgspec.json.decode(raw, type=Parameters) if raw else Parameters()

    def status(self) -> bytes:
        """The answer to `model_status`."""
        if self.trainings.active():
            return b"training"
        return b"completed" if self.live() else b"not started"

    def live(self) -> str:
        """The live version of the shared model, "" before the first."""
        with answering():
            raw: Any = self.client.hget(Keys(self.settings.redis.key_prefix).model(), "version")
        return raw.decode() if raw else ""

    def train_model(self, data: bytes) -> None:
        """Watches the workloads, and trains where some are new. Raises BadInput."""
        asked = _read(Asked, data, subjects.TRAIN_MODEL)
        before = self.parameters()
        if asked.workloads is None:
            self._watch(before.workloads, {})
            self._remember(Parameters())
            self.tell(subjects.MODEL_UPDATE, {"status": "reset"})
            self.tell(subjects.MODEL_WORKLOADS, {"workloads": {}, "status_type": "reset"})
            return
        self._watch(before.workloads, asked.workloads)
        now = Parameters(uuid=asked.uuid, workloads=asked.workloads, trained=before.trained)
        self._remember(now)
        new = set(patterns_of(asked.workloads)) - set(patterns_of(before.trained))
        trains = bool(new) and self._train(asked.workloads, data)
        kind = "train" if trains else "update"
        self.tell(subjects.MODEL_WORKLOADS, {"workloads": asked.workloads, "status_type": kind})

    def train(self, data: bytes) -> None:
        """Trains with the workloads of the message. Raises BadInput."""
        job = _read(TrainJob, data, subjects.TRAIN)
        self._train(job.parameters.workloads or {}, data)

    def train_as_gpu_service(self, data: bytes) -> None:
        """As `train`, where Opni's training controller has told the start. Raises BadInput."""
        job = _read(InternalJob, data, subjects.GPU_TRAINING)
        if not self._request(job.payload.parameters.workloads or {}, data):
            self.tell(subjects.JOB_STATUS, b"JobEnd")

    def _train(self, workloads: Workloads, data: bytes) -> bool:
        if not (request_id := self._request(workloads, data)):
            return False
        self.tell(subjects.JOB_STATUS, b"JobStart", f"{request_id} start")
        return True

    def _request(self, workloads: Workloads, data: bytes) -> str:
        """The id of the training; "" where no line of these workloads has come yet."""
        seen = sorted(self.ledger.backlog.totals())
        found = [one for one in patterns_of(workloads) if any(covers([one], name) for name in seen)]
        if not found:
            self.log.warning("nats.nothing_to_train", workloads=patterns_of(workloads)[:10])
            return ""
        try:
            request_id, _ = request_training(
                self.client, self.settings, TrainingAsked(workloads=found), by=BY, why="asked over NATS"
            )
        except (BadInput, TrainingsFull) as exc:
            self.log.warning("nats.not_trained", why=str(exc))
            return ""
        with answering():
            self.client.hset(self.key, request_id, data)
        return request_id

    def _watch(self, before: Workloads, now: Workloads) -> None:
        old, new = set(patterns_of(before)), set(patterns_of(now))
        if gone := sorted(old - new):
            self.watchlist.remove(*gone)
        if more := sorted(new - old):
            self.watchlist.add(*more)

    def _remember(self, parameters: Parameters) -> None:
        with answering():
            self.client.hset(self.key, _PARAMETERS, msgspec.json.encode(parameters))

    # ---- what is told -----------------------------------------------------------------------------

    def tend(self) -> None:
        """Tells the ends of trainings, and a model that has become live."""
        with answering():
            found = text_map(self.client.hgetall(self.key))
        for name, job in found.items():
            if not name.startswith("=") and _has_ended(status := self.trainings.followed(name)):
                self._tell_end(name, job, status)
        version, told = self.live(), found.get(_LIVE, "")
        if version != told:
            if version:
                files = {"model_file": version, "vocab_file": version}
                self.tell(subjects.MODEL_UPDATE, {"bucket": MODELS, "bucket_files": files}, version)
            with answering():
                self.client.hset(self.key, _LIVE, version)

    def _tell_end(self, request_id: str, job: str, status: Status) -> None:
        self.tell(subjects.JOB_STATUS, b"JobEnd", f"{request_id} end")
        if status.state is TrainingState.COMPLETED and status.published:
            self._note_trained(job)
        with answering():
            self.client.hdel(self.key, request_id)
        self.log.info("nats.job_ended", training=request_id, state=status.state.value)

    def _note_trained(self, job: str) -> None:
        """In Redis, and where Opni's training controller looks after a restart."""
        found = msgspec.json.decode(job)
        inner = found.get("payload", found)
        workloads = inner.get("parameters", inner).get("workloads") or {}
        parameters = self.parameters()
        parameters.trained = workloads
        self._remember(parameters)
        if not self.connection.source.is_durable:
            return
        told = found if "payload" in found else {"payload": {"parameters": inner.get("parameters", inner)}}

        async def put() -> None:
            kv = await self.connection.client.jetstream().key_value(BUCKET)
            await kv.put(LAST_TRAINED, json.dumps(told).encode())

        try:
            self.connection.call(put())
        except SourceUnavailable as exc:
            self.log.info("nats.not_noted", bucket=BUCKET, why=str(exc))  # only Opni's controller needs it

    def tell(self, subject: str, message: Mapping[str, Any] | bytes, msg_id: str = "") -> None:
        """Publishes a control message; over JetStream once per `msg_id`."""
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        if self.connection.source.is_durable:
            names = digest(subject, msg_id or f"{now_ms(self.client)}", data, size=16)
            work = publish_all(self.connection.jetstream, [(subject, data, names, {})])
            self.connection.call(work, PUBLISH_S)
            return
        client = self.connection.client

        async def publish() -> None:
            await client.publish(subject, data)
            await client.flush(timeout=5)

        self.connection.call(publish(), PUBLISH_S)


def _has_ended(status: Status) -> bool:
    """Also where Redis has forgotten it."""
    return bool(status.ended) or status.state is TrainingState.NONE


def _read(kind: type[T], data: bytes, subject: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as exc:
        raise BadInput(
            f"the message of {subject} cannot be read ({exc}); send what Opni's services send"
        ) from exc
