"""The store that an address names. A new kind is one line here."""

from pathlib import Path

from pipeline.errors import BadSetting
from pipeline.settings.values import store_place
from pipeline.store.folder import Folder
from pipeline.store.objects import Objects


def open_store(url: str) -> Objects:
    """The store at this address; nothing is read or written yet. Raises BadSetting."""
    try:
        scheme, bucket, path = store_place(url)
    except ValueError as exc:
        raise BadSetting(str(exc)) from exc
    if scheme == "file":
        return Folder(Path(path))
    from pipeline.store.bucket import Bucket  # obstore is of an extra

    return Bucket(bucket, path)
