"""Arguments of Lua scripts by name."""

import msgpack
import msgspec


def named_arguments(value: msgspec.Struct) -> bytes:
    """One argument of named fields, for `cmsgpack.unpack` in a script. Numbers become doubles there.

    Redis before 7 reads no msgpack of type bin, so bytes travel as strings.
    """
    return bytes(msgpack.packb(msgspec.structs.asdict(value), use_bin_type=False))
