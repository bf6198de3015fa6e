"""The pool's values as JSON: what Redis holds of them, and what commands print.

Each text carries the version of its form. Readers ignore fields they do not know and give missing ones their default.
Floats are written as text, because the JSON of Lua keeps 14 digits only; it also writes an empty list as `{}`.
"""

import json
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any, Final

from pipeline.errors import BadPayload
from pipeline.gpu.values import Device, Node, Orphan, PoolLease, PoolPlan, PoolRequest, Report, Reservation

VERSION: Final = 1
CACHED: Final = 16_384  # texts that did not change between two looks are not read again; about 1 KiB each


def encode(value: Any, *, without: tuple[str, ...] = ()) -> str:
    """The JSON of one of the values below, `without` these of its own fields."""
    plain = {name: _plain(part) for name, part in _items(value) if name not in without}
    text = json.dumps({"v": VERSION, **plain}, ensure_ascii=False, separators=(",", ":"))
    # Names can come from a command line whose bytes are no text; Redis and Lua get text in any case.
    return text.encode("utf-8", "replace").decode("utf-8")


def device(text: str | bytes) -> Device:
    """Raises BadPayload, as all readers here do."""
    return typing.cast("Device", _cached(Device, text, ()))


def node(text: str | bytes, *, beat_ms: int | None = None) -> Node:
    """`beat_ms`: for a text without it, as Redis holds it."""
    return typing.cast("Node", _cached(Node, text, () if beat_ms is None else (("beat_ms", beat_ms),)))


def lease(text: str | bytes, *, deadline_ms: int | None = None) -> PoolLease:
    """`deadline_ms`: for a text without it, as Redis holds it."""
    more = () if deadline_ms is None else (("deadline_ms", deadline_ms),)
    return typing.cast("PoolLease", _cached(PoolLease, text, more))


def request(text: str | bytes) -> PoolRequest:
    return typing.cast("PoolRequest", _cached(PoolRequest, text, ()))


def orphan(text: str | bytes) -> Orphan:
    return typing.cast("Orphan", _cached(Orphan, text, ()))


def reservation(text: str | bytes) -> Reservation:
    return typing.cast("Reservation", _cached(Reservation, text, ()))


def plan(text: str | bytes) -> PoolPlan:
    return typing.cast("PoolPlan", _cached(PoolPlan, text, ()))


def report(text: str | bytes) -> Report:
    return typing.cast("Report", _cached(Report, text, ()))


@lru_cache(CACHED)
def _cached(kind: Any, text: str | bytes, more: tuple[tuple[str, int], ...]) -> Any:
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise TypeError("it is no object")
        if int(raw.get("v", VERSION)) > VERSION:
            raise ValueError(f"it has version {raw['v']}, and this program reads up to {VERSION}")
        return _reader(kind)({**raw, **dict(more)})
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        shown = text[:200] if isinstance(text, str) else text[:200].decode("utf-8", "replace")
        raise BadPayload(
            f"a stored {kind.__name__} cannot be read ({exc}); it begins with {shown!r}"
        ) from exc


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


def _items(value: Any) -> list[tuple[str, Any]]:
    kind: Any = type(value)
    return [(name, getattr(value, name)) for name in _names(kind)]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if is_dataclass(value):
        return {name: _plain(part) for name, part in _items(value)}
    return value


@cache
def _reader(wanted: Any) -> Callable[[Any], Any]:
    """What turns the JSON of a type into its value; made once per type, because looks read thousands of texts."""
    if is_dataclass(wanted):
        return _object_reader(wanted)
    if typing.get_origin(wanted) is types.UnionType:
        inner = _reader(next(arg for arg in typing.get_args(wanted) if arg is not types.NoneType))
        return lambda raw: None if raw is None else inner(raw)
    if typing.get_origin(wanted) is tuple:
        part = _reader(typing.get_args(wanted)[0])
        return lambda raw: tuple(part(item) for item in raw or ())
    if wanted in (int, float, bool) or issubclass(wanted, StrEnum):
        return typing.cast("Callable[[Any], Any]", wanted)
    return _text


def _text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise TypeError(f"{raw!r} is no text")
    return raw


def _object_reader(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    readers = [
        (item.name, _reader(hints[item.name]), item.default is MISSING and item.default_factory is MISSING)
        for item in fields(kind)
    ]

    def read(raw: Any) -> Any:
        values = {name: reader(raw[name]) for name, reader, needed in readers if needed or name in raw}
        return kind(**values)

    return read
