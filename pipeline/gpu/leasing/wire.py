"""The pool's values as JSON in Redis, read and written by Python and by Lua.

Each text carries a version. Readers ignore unknown fields and give missing ones their default. Two habits of
Lua's JSON shape the form: it keeps 14 digits, so floats travel as text, and it writes an empty list as `{}`.
"""

import json
import re
from collections.abc import Hashable, Sequence
from functools import cache, lru_cache
from typing import Any, Final, TypeVar, cast

import msgspec

from pipeline.errors import BadPayload
from pipeline.gpu.values import DeviceKind, LeaseMode, Need
from pipeline.records.remembered import remembered

T = TypeVar("T")
VERSION: Final = 1
CACHED: Final = 16_384  # Texts that are not decoded again when a snapshot repeats them; about 1 KiB each.
# A whole string at a time, so that nothing inside one is touched; only a key is followed by a colon.
_STRING: Final = re.compile(rb'("(?:[^"\\]|\\.)*")(:\{\})?')


class _Versioned(msgspec.Struct):
    v: int = VERSION


def encode(value: Any, *, without: tuple[str, ...] = ()) -> str:
    """The JSON of a dataclass of gpu/values.py, `without` these of its fields."""
    plain = {name: part for name, part in msgspec.to_builtins(value).items() if name not in without}
    text = json.dumps({"v": VERSION, **_floats_as_text(plain)}, ensure_ascii=False, separators=(",", ":"))
    # Names can come from a command line whose bytes are no text; Redis and Lua get text in any case.
    return text.encode("utf-8", "replace").decode("utf-8")


def _floats_as_text(plain: Any) -> Any:
    if isinstance(plain, float):
        return repr(plain)
    if isinstance(plain, dict):
        return {name: _floats_as_text(part) for name, part in plain.items()}
    if isinstance(plain, list | tuple):
        return [_floats_as_text(part) for part in plain]
    return plain


def read_json(kind: type[T], text: str | bytes) -> T:
    """The value of a text; the last CACHED texts are remembered. Raises BadPayload."""
    return cast("T", _decoded(cast("Hashable", kind), text))


def read_demand(flat: Sequence[bytes]) -> dict[Need, int]:
    """Recent needs by their form, from the hash that gpu/wait.lua counts in. Raises BadPayload."""
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {_form(text): int(count) for text, count in pairs if text}


@remembered(1_024, 512)
def _form(text: bytes) -> Need:
    try:
        mode, memory, compute, devices, kind, cpu, node_memory, same_node, model = text.decode(
            "utf-8", "replace"
        ).split("|", 8)
        return Need(
            mode=LeaseMode(mode),
            memory_mib=int(memory),
            compute_percent=int(compute),
            devices=int(devices),
            device_kind=DeviceKind(kind),
            cpu_milli=int(cpu),
            node_memory_mib=int(node_memory),
            same_node=same_node == "1",
            model=model,
        )
    except ValueError as exc:
        raise BadPayload(
            f"the form {text!r} of recent needs cannot be read ({exc}); delete gpu:demand"
        ) from exc


def _lists(raw: bytes) -> bytes:
    """The JSON with `[]` for the empty lists of Lua; no value of the pool holds an empty object."""
    return _STRING.sub(lambda match: match[1] + (b":[]" if match[2] else b""), raw)


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=False)  # lax: numbers may stand as text


@lru_cache(CACHED)
def _decoded(kind: Any, text: str | bytes) -> Any:
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    try:
        version = msgspec.json.decode(raw, type=_Versioned).v
        if version > VERSION:
            raise ValueError(f"it has version {version}, and this program reads up to {VERSION}")
        return _decoder(kind).decode(_lists(raw) if b":{}" in raw else raw)
    except (msgspec.DecodeError, ValueError) as exc:
        shown = raw[:200].decode("utf-8", "replace")
        raise BadPayload(
            f"a stored {kind.__name__} cannot be read ({exc}); it begins with {shown!r}"
        ) from exc
