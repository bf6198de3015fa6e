"""From text to values: what settings are made of, whatever level they come from."""

import os
import re
import types
import typing
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from pipeline.errors import BadSetting

# What REDIS_URL may say about TLS: what redis-py and kombu both understand.
TLS_OPTIONS: Final = (
    "ssl_cert_reqs",
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_check_hostname",
)
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


def check_url(url: str) -> None:
    """Raises BadSetting without the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # parsed only when it is asked for
    except ValueError:
        raise BadSetting("REDIS_URL is not a URL; write it like redis://host:6379/0") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise BadSetting("REDIS_URL must begin with redis://, rediss:// or unix://")
    options = {name: value for name, value in parse_qsl(parts.query) if name.startswith("ssl_")}
    if options and parts.scheme != "rediss":
        raise BadSetting(
            "REDIS_URL has options for TLS, which only rediss:// has; write rediss://, or leave them out"
        )
    if unknown := sorted(set(options) - set(TLS_OPTIONS)):
        raise BadSetting(
            f"REDIS_URL has the unknown option {unknown[0]!r}; known are {', '.join(TLS_OPTIONS)}"
        )
    if options.get("ssl_cert_reqs", "required") not in ("required", "optional", "none"):
        raise BadSetting("ssl_cert_reqs in REDIS_URL must be required, optional or none")


def check_opensearch_url(url: str) -> None:
    """Raises BadSetting without the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise BadSetting("OPENSEARCH_URL is not a URL; write it like https://host:9200") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadSetting("OPENSEARCH_URL must begin with http:// or https:// and name a host")


def as_type(name: str, value: Any, wanted: Any, *, secret: bool = False) -> Any:
    if isinstance(wanted, types.UnionType):
        if value is None or value == "":
            return None
        wanted = next(arg for arg in typing.get_args(wanted) if arg is not type(None))
    shown = "***" if secret else repr(value)
    wrong = BadSetting(f"{name} = {shown} has the wrong type; it must be {_word(wanted)}")
    try:
        if typing.get_origin(wanted) is tuple:
            return _items(value, typing.get_args(wanted)[0])
        if wanted is bool:
            return _truth(value)
        if isinstance(value, bool) or (isinstance(value, float) and wanted is int):
            raise wrong
        if wanted is str and not isinstance(value, str):
            raise wrong
        return wanted(value)
    except (TypeError, ValueError) as exc:
        raise wrong from exc


def masked_url(url: str) -> str:
    """The URL with its password hidden, for messages and logs, also where the password makes it no valid URL."""
    scheme, mark, rest = url.partition("://")
    userinfo, at, place = rest.rpartition("@")
    if ":" in userinfo:
        rest = f"{userinfo.partition(':')[0]}:***{at}{place}"
    return re.sub(r"(?i)([?&](?:ssl_)?password=)[^&#]*", r"\1***", scheme + mark + rest)


def _word(wanted: Any) -> str:
    if typing.get_origin(wanted) is tuple:
        return "a list of paths" if typing.get_args(wanted)[0] is Path else "a list of words"
    return "true or false" if wanted is bool else str(wanted.__name__)


def _items(value: Any, kind: type) -> tuple[Any, ...]:
    """Paths are separated as in PATH, words by commas."""
    items = value.split(os.pathsep if kind is Path else ",") if isinstance(value, str) else value
    if not all(isinstance(item, str | kind) for item in items):
        raise TypeError
    return tuple(kind(item.strip() if isinstance(item, str) else item) for item in items if str(item).strip())


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).strip().lower() not in (*_TRUE, *_FALSE):
        raise ValueError
    return str(value).strip().lower() in _TRUE


def joined(value: Any) -> str:
    """A value as text that `as_type` reads back."""
    if isinstance(value, tuple):
        paths = any(isinstance(item, Path) for item in value)
        return (os.pathsep if paths else ",").join(str(item) for item in value)
    return str(value)
