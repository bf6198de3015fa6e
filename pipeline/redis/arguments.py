"""Arguments of Lua scripts by name, for `cmsgpack.unpack` in a script. Numbers become doubles there."""

import msgspec


def named_arguments(value: msgspec.Struct) -> bytes:
    """One argument of named fields, none of them bytes: Redis before 7 reads no msgpack of type bin."""
    return msgspec.msgpack.encode(value)


def named_arguments_with_bytes(value: msgspec.Struct) -> bytes:
    """As `named_arguments`, for fields that hold bytes, which travel as strings; needs the extra `worker`."""
    import msgpack

    return bytes(msgpack.packb(msgspec.structs.asdict(value), use_bin_type=False))
