"""A store in a bucket of S3, or of a server that speaks S3; and the reading of buckets that others filled.

Address and credentials come from the variables that every S3 client knows: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, and AWS_ENDPOINT_URL for other servers than Amazon's. obstore reads them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import S3Store

from pipeline.errors import BadInput, StoreUnavailable
from pipeline.store.objects import Found, checked

# One request never takes longer, so a store that hangs holds nothing up for ever.
REQUEST_S: Final = 30
CONNECT_S: Final = 5
RETRIES: Final = 3
RETRY_S: Final = 20


class Bucket:
    """Objects of one bucket, below a prefix."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        with self._explained():
            self._store = _client(bucket, prefix)

    def get(self, key: str) -> bytes | None:
        with self._explained():
            try:
                return bytes(obstore.get(self._store, checked(key)).bytes())
            except (NotFoundError, FileNotFoundError):
                return None

    def fetch(self, key: str, to: Path, *, max_bytes: int) -> bool:
        with self._explained():
            try:
                answer = obstore.get(self._store, checked(key))
            except (NotFoundError, FileNotFoundError):
                return False
            read = 0
            with to.open("wb") as out:
                for piece in answer.stream(min_chunk_size=1 << 20):
                    read += len(piece)
                    out.write(piece)
                    if read > max_bytes:
                        break
        return True

    def create(self, key: str, content: bytes | Path) -> bool:
        with self._explained():
            try:
                # One request carries one condition: no multipart upload.
                obstore.put(self._store, checked(key), content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def put(self, key: str, content: bytes | Path) -> None:
        with self._explained():
            obstore.put(self._store, checked(key), content, use_multipart=False)

    def tagged(self, key: str) -> tuple[bytes, str] | None:
        with self._explained():
            try:
                answer = obstore.get(self._store, checked(key))
                return bytes(answer.bytes()), str(answer.meta["e_tag"])
            except (NotFoundError, FileNotFoundError):
                return None

    def swap(self, key: str, content: bytes, tag: str | None) -> str | None:
        condition: Any = "create" if tag is None else {"e_tag": tag}
        with self._explained():
            try:
                written = obstore.put(self._store, checked(key), content, mode=condition, use_multipart=False)
            except (AlreadyExistsError, PreconditionError, NotFoundError, FileNotFoundError):
                return None
            return str(written["e_tag"])

    def look(self, key: str) -> Found | None:
        with self._explained():
            try:
                one = obstore.head(self._store, checked(key))
            except (NotFoundError, FileNotFoundError):
                return None
            return Found(key=key, size=one["size"], changed=one["last_modified"].timestamp())

    def found(self, prefix: str) -> Iterator[Found]:
        with self._explained():
            for page in obstore.list(self._store, prefix=checked(prefix.rstrip("/"))):
                for one in page:
                    changed = one["last_modified"].timestamp()
                    yield Found(key=one["path"], size=one["size"], changed=changed)

    def delete(self, key: str) -> None:
        with self._explained():
            try:
                obstore.delete(self._store, checked(key))
            except (NotFoundError, FileNotFoundError):
                return

    def sweep(self, _prefix: str) -> int:
        """Nothing: a bucket shows no half objects."""
        return 0

    def _explained(self) -> AbstractContextManager[None]:
        return _explained(f"the store {self.url} does not take or give objects", "the bucket")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An object of a bucket. `tag` is its ETag, which changes with its content."""

    key: str
    size: int
    changed: float  # seconds since 1970
    tag: str


class ForeignBucket:
    """A bucket that others filled: any key, read only. Methods raise StoreUnavailable as `Bucket` does."""

    def __init__(self, bucket: str) -> None:
        self.url = f"s3://{bucket}"
        with self._explained():
            self._store = _client(bucket, "")

    def listed(self, prefix: str) -> Iterator[Listed]:
        """The objects below a prefix, in no order. Raises BadInput for a bucket that does not exist."""
        with self._explained():
            try:
                for page in obstore.list(self._store, prefix=prefix.strip("/") or None):
                    for one in page:
                        yield _listed(one)
            except BaseError as exc:
                if not isinstance(exc, NotFoundError) and "NoSuchBucket" not in str(exc):
                    raise
                raise BadInput(
                    f"the bucket {self.url} does not exist; check its name, AWS_ENDPOINT_URL and AWS_REGION"
                ) from exc

    def look(self, key: str) -> Listed | None:
        """The object of this key, None where there is none."""
        with self._explained():
            try:
                return _listed(obstore.head(self._store, key))
            except (NotFoundError, FileNotFoundError):
                return None

    def part(self, key: str, start: int, end: int) -> tuple[bytes, str] | None:
        """Bytes from `start` up to `end`, and the tag of their object; None where that is gone."""
        with self._explained():
            try:
                answer = obstore.get(self._store, key, options={"range": (start, end)})
                return bytes(answer.bytes()), str(answer.meta["e_tag"])
            except (NotFoundError, FileNotFoundError):
                return None

    def _explained(self) -> AbstractContextManager[None]:
        return _explained(f"the bucket {self.url} cannot be read", "their right to list and read it")


def _listed(one: Any) -> Listed:
    return Listed(
        key=str(one["path"]),
        size=int(one["size"]),
        changed=one["last_modified"].timestamp(),
        tag=str(one["e_tag"]),
    )


def _client(bucket: str, prefix: str) -> S3Store:
    return S3Store(
        bucket,
        prefix=prefix or None,
        virtual_hosted_style_request=False,
        client_options={
            "allow_http": True,  # as AWS_ENDPOINT_URL says
            "timeout": timedelta(seconds=REQUEST_S),
            "connect_timeout": timedelta(seconds=CONNECT_S),
        },
        retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
    )


@contextmanager
def _explained(fault: str, look_at: str) -> Iterator[None]:
    """Errors of the client as StoreUnavailable, with the fault, its cause and the remedy."""
    try:
        yield
    except (BaseError, OSError) as exc:
        why = " ".join(str(exc).partition("Debug source")[0].split())[:300]
        raise StoreUnavailable(
            f"{fault} ({why}); look at AWS_ENDPOINT_URL, the keys of AWS_ACCESS_KEY_ID, and {look_at}"
        ) from exc
