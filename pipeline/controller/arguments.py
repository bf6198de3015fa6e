"""The arguments of training/*.lua by name."""

import msgspec


class RequestArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for a training (request.lua)."""

    request_id: str
    key: str  # equal requests have the same
    request: str  # JSON
    most: int  # how many may wait


class CancelArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Stops a training (cancel.lua)."""

    request_id: str
    model: str
    keep_s: int
    keep: int  # how many ended ones are remembered


class TakeArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Begins a training (take.lua)."""

    request_id: str
    holder: str
    token: str
    before: str  # id of the training that ran last, "" for none


class ShowArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Reports progress (show.lua)."""

    token: str
    state: str
    status: str  # JSON


class EndArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Ends a training (end.lua)."""

    request_id: str
    token: str  # "": the sweep, which ends a training only when nobody holds its lease
    state: str
    status: str  # JSON
    model: str
    version: str  # "": it came to none
    published: bool
    reason: str
    keep_s: int
    keep: int  # how many ended ones are remembered
    retry_id: str  # "": no retry
    retry_key: str
    retry: str  # JSON
    pause_ms: int
