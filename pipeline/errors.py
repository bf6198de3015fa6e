"""Every error Logweir raises on purpose. Each class answers one question: will trying again help?

    LogweirError
    |-- Retryable                 trying again later can succeed; nothing is wrong with the data
    |   |-- RedisUnavailable      Redis does not answer, is loading, or is out of memory
    |   |-- SinkUnavailable       results cannot be written now (disk full, store down, no right to write)
    |   |-- StoreUnavailable      objects of the store cannot be read or written now (away, full, no right)
    |   |-- SourceUnavailable     logs cannot be read now (store down, no right to read)
    |   |-- ModelUnavailable      no version of a model can be read until its files are repaired
    |   |-- LiveChanged           another version became live meanwhile; read it again
    |   |-- LeaseRefused          another holder has the resource
    |   |-- NoDriver              the NVIDIA driver is not there or went away
    |   |-- DeviceFailed          a leased GPU does not work; another process, device or the CPU may do
    |   |-- CursorMoved           the ledger's cursor stands elsewhere; go on from there
    |   |-- TrainingsFull         too many trainings wait
    |   |-- TooNew                a newer build wrote it; a worker of that build can read it
    |   |-- NotDrained            batches in the pipeline are not stored yet; they stay accepted
    |   `-- ClaimLost             another worker owns the batch now; stop quietly
    `-- Fatal                     trying again gives the same answer
        |-- BadInput              the user's input is unusable (exit code 2, HTTP 4xx)
        |   |-- NotFound          there is nothing of the name that was given (HTTP 404)
        |   |-- BadSetting        unknown key, wrong type, missing value
        |   |-- NoRedis           at a start: no Redis answers at its address, or it still reads its data
        |   `-- BadMask           a mask pattern that does not compile or does not match its example
        |-- ObjectChanged         an object of an archive is gone, or another one than was planned
        |-- BadPayload            a stored payload or message that cannot be read
        |-- Rejected              records that a store will never take (mapping conflict)
        |-- BadBundle             a model version whose files are missing or do not match their hashes
        |   `-- OlderBundle       one that an older build made: a training replaces it, no repair helps
        |-- StaleToken            the fencing token is not the newest: the lease is lost
        |-- TrainingFailed        a training that cannot give a model, with its reason
        |-- Cancelled             a training was stopped by an operator
        |-- AnswerCancelled       a question about results was stopped, or took longer than its limit
        |-- StepFailed            a step's fault for Celery and Flower; the ledger has recorded it
        `-- StackFailed           a process of the embedded stack cannot start or keeps dying

Messages name the value and the remedy, in one sentence.
"""

from collections.abc import Collection


class LogweirError(Exception):
    """Base of all errors below."""


class Retryable(LogweirError):
    """Trying again later can succeed."""


class RedisUnavailable(Retryable):
    """Redis does not answer, is loading, or refuses writes."""


class SinkUnavailable(Retryable):
    """Results cannot be written now."""


class StoreUnavailable(Retryable):
    """Objects of the store cannot be read or written now."""


class SourceUnavailable(Retryable):
    """Logs cannot be read now."""


class ModelUnavailable(Retryable):
    """No version of a model can be read."""


class LiveChanged(Retryable):
    """Another version became live meanwhile."""


class LeaseRefused(Retryable):
    """Another holder has the resource."""


class NoDriver(Retryable):
    """There is no NVIDIA driver, or it went away."""


class DeviceFailed(Retryable):
    """A GPU cannot be used as it was leased."""


class CursorMoved(Retryable):
    """A source continues from another place than the ledger's cursor. `cursor`: the ledger's, "" when there
    is none."""

    def __init__(self, message: str, cursor: str) -> None:
        super().__init__(message)
        self.cursor = cursor


class TrainingsFull(Retryable):
    """Too many trainings wait."""


class TooNew(Retryable):
    """A newer build wrote this value; a worker of that build can read it."""


class NotDrained(Retryable):
    """Work remains, or a stack does not end."""


class ClaimLost(Retryable):
    """Another worker owns the batch now."""


class Fatal(LogweirError):
    """Trying again gives the same answer."""


class BadInput(Fatal):
    """The user gave something unusable; exit code 2."""


class NotFound(BadInput):
    """There is nothing of the name that the user gave."""


class BadSetting(BadInput):
    """A setting is unknown, missing or of the wrong type."""


class NoRedis(BadInput):
    """No Redis answers yet. `loading`: it is there and still reads its data, so it is worth a wait."""

    def __init__(self, message: str, *, loading: bool = False) -> None:
        super().__init__(message)
        self.loading = loading


class BadMask(BadInput):
    """A mask does not compile or does not match its example."""


class ObjectChanged(Fatal):
    """An object of an archive is gone, or has other content than when its reading was planned."""


class BadPayload(Fatal):
    """A stored payload or message cannot be read."""


class Rejected(Fatal):
    """A store will never take some records of a batch. `ids`: their record ids, if the store named them."""

    def __init__(self, message: str, ids: Collection[str] = ()) -> None:
        super().__init__(message)
        self.ids = frozenset(ids)


class BadBundle(Fatal):
    """A model version cannot be loaded."""


class OlderBundle(BadBundle):
    """An older build made this model version, so that no process of this build can load it."""


class StaleToken(Fatal):
    """The lease was lost; its token is no longer the newest."""


class TrainingFailed(Fatal):
    """No model can come out of this training."""


class Cancelled(Fatal):
    """An operator stopped the training."""


class AnswerCancelled(Fatal):
    """A question about results was stopped, or took too long."""


class StepFailed(Fatal):
    """A step failed. The ledger knows what follows; this error is for people who watch tasks."""


class StackFailed(Fatal):
    """A process of the embedded stack cannot start or keeps dying."""
