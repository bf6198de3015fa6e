"""Checks of addresses, their text without a password, and the nearest of the known names."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

# The options for TLS in REDIS_URL that both redis-py and Kombu understand.
TLS_OPTIONS: Final = (
    "ssl_cert_reqs",
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_check_hostname",
)
SENTINEL_SCHEME: Final = "sentinel://"
SENTINELS_TLS_SCHEME: Final = "sentinels://"
SENTINEL_PORT: Final = 26379
SENTINEL_OPTIONS: Final = ("master", "db", "sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelAddress:
    """A Redis whose master is known to sentinels:
    `sentinel://[USER:PASSWORD@]HOST[:PORT],.../DB?master=NAME[&sentinel_username=U][&sentinel_password=P]`.

    User and password are those of the Redis servers; the sentinels have their own. `sentinels://` is the same
    over TLS, to servers and sentinels, with the options of `rediss://`."""

    sentinels: tuple[tuple[str, int], ...]  # host and port
    master: str  # the name of the group in the sentinels' configuration
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: Mapping[str, str] | None = field(default=None, repr=False)  # TLS_OPTIONS by name; None without TLS

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises ValueError without the URL: it may hold a password."""
        # Not urlsplit: it reads one host and one port.
        scheme, _, address = url.partition("://")
        over_tls = f"{scheme}://" == SENTINELS_TLS_SCHEME
        place, _, query = address.partition("?")
        login, _, place = place.rpartition("@")
        hosts, _, database = place.partition("/")
        options = dict(parse_qsl(query, keep_blank_values=True))
        tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
        _check_tls(tls, over_tls=over_tls, scheme=SENTINELS_TLS_SCHEME)
        if unknown := sorted(set(options) - set(tls) - set(SENTINEL_OPTIONS)):
            raise ValueError(
                f"REDIS_URL has the unknown option {unknown[0]!r}; known are {', '.join(SENTINEL_OPTIONS)}"
            )
        if not options.get("master"):
            raise ValueError(
                "REDIS_URL names no master; write it like sentinel://host1:26379,host2:26379/0?master=NAME"
            )
        database = database or options.get("db", "")
        if database and not (database.isascii() and database.isdigit()):
            raise ValueError("the database in REDIS_URL is not a number; write it like /0")
        user, _, password = login.partition(":")
        return cls(
            sentinels=tuple(_host_and_port(text) for text in hosts.split(",")),
            master=options["master"],
            database=int(database or 0),
            username=unquote(user) or None,
            password=unquote(password) or None,
            sentinel_username=options.get("sentinel_username") or None,
            sentinel_password=options.get("sentinel_password") or None,
            tls=tls if over_tls else None,
        )


def is_sentinel(url: str) -> bool:
    """Whether an address names sentinels, with TLS or without."""
    return url.startswith((SENTINEL_SCHEME, SENTINELS_TLS_SCHEME))


def _check_tls(options: Mapping[str, str], *, over_tls: bool, scheme: str) -> None:
    """Raises ValueError; `scheme` is the one with TLS."""
    if options and not over_tls:
        raise ValueError(
            f"REDIS_URL has options for TLS, which only {scheme} has; write {scheme}, or leave them out"
        )
    if unknown := sorted(set(options) - set(TLS_OPTIONS)):
        raise ValueError(
            f"REDIS_URL has the unknown option {unknown[0]!r}; known are {', '.join(TLS_OPTIONS)}"
        )
    if options.get("ssl_cert_reqs", "required") not in ("required", "optional", "none"):
        raise ValueError("ssl_cert_reqs in REDIS_URL must be required, optional or none")


def _host_and_port(text: str) -> tuple[str, int]:
    """Raises ValueError without the text: it may be a part of a password."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/@\[\];]+)(?::(\d{1,5}))?", text)
    port = int(found[2] or SENTINEL_PORT) if found else 0
    if found is None or not 0 < port < 65_536:
        raise ValueError(
            "REDIS_URL has a sentinel that is not HOST or HOST:PORT; separate them by commas, like "
            "sentinel://host1:26379,host2:26379/0?master=NAME"
        )
    return found[1].strip("[]"), port


_SPANS: Final = {"h": 3_600, "d": 86_400, "w": 604_800, "y": 31_557_600}
# How long results stay that `results_keep` does not name; by table (sinks/manifest.py, sinks/usage.py).
# 395 d are 13 months.
_KEEP_BY_DEFAULT: Final = {
    "lines": "30d",
    "findings": "395d",
    "rates_5m": "30d",
    "rates_1h": "395d",
    "usage": "395d",
}
_SIZES: Final = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def check_url(url: str) -> None:
    """Raises ValueError without the URL: it may hold a password."""
    if is_sentinel(url):
        SentinelAddress.parse(url)
        return
    parts = _split(url, "REDIS_URL is not a URL; write it like redis://host:6379/0")
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError(
            "REDIS_URL must begin with redis://, rediss://, unix://, sentinel:// or sentinels://"
        )
    options = {name: value for name, value in parse_qsl(parts.query) if name.startswith("ssl_")}
    _check_tls(options, over_tls=parts.scheme == "rediss", scheme="rediss://")


def check_opensearch_url(url: str) -> None:
    """Raises ValueError without the URL: it may hold a password."""
    parts = _split(url, "OPENSEARCH_URL is not a URL; write it like https://host:9200")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("OPENSEARCH_URL must begin with http:// or https:// and name a host")


def store_place(url: str) -> tuple[str, str, str]:
    """("file", "", absolute path) or ("s3", bucket, prefix). Raises ValueError for any other address."""
    wanted = "write it like file:///mnt/logweir or s3://bucket/prefix"
    parts = _split(url, f"store_url is not a URL; {wanted}")
    path = unquote(parts.path)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and path.startswith("/"):
        return "file", "", path
    plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme == "s3" and parts.netloc and plain:
        return "s3", parts.netloc, path.strip("/")
    if "@" in parts.netloc:
        raise ValueError(
            "store_url holds credentials; give them as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
        )
    raise ValueError(f"store_url {url!r} is not usable; {wanted}")


def kept_results(words: Iterable[str]) -> dict[str, float]:
    """`lines=30d`, `findings=1y`, `size=200GiB` as seconds and bytes by name.

    A table that is not named has its default; one that stays for ever (`lines=forever`) is absent. Raises
    ValueError for another form."""
    words_of: dict[str, str] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name in words_of:
            raise ValueError(f"results_keep names {name} twice ({word!r}); leave one of them out")
        words_of[name] = text.strip()
    found: dict[str, float] = {}
    for name, text in (_KEEP_BY_DEFAULT | words_of).items():
        units = _SIZES if name == "size" else _SPANS
        number = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*([A-Za-z]+)", text)
        if name in _KEEP_BY_DEFAULT and text == "forever":
            continue
        if (
            name not in (*_KEEP_BY_DEFAULT, "size")
            or number is None
            or number[2] not in units
            or not float(number[1])
        ):
            raise ValueError(
                f"results_keep {name}={text} is not usable; write lines, findings, rates_5m, rates_1h or "
                "usage like lines=30d or lines=forever, and size=200GiB"
            )
        found[name] = float(number[1]) * units[number[2]]
    return found


def masked_url(url: str) -> str:
    """The URL with its password hidden, for messages and logs, also where the password makes it no valid
    URL."""
    # Options first: an @ in one would be taken for the end of a login.
    url = re.sub(r"(?i)([?&](?:ssl_|sentinel_)?password=)[^&#]*", r"\1***", url)
    scheme, mark, address = url.partition("://")
    userinfo, at, place = address.rpartition("@")
    if ":" in userinfo:
        address = f"{userinfo.partition(':')[0]}:***{at}{place}"
    return scheme + mark + address


def nearest(word: str, names: Iterable[str], *, limit: int = 3) -> list[str]:
    """The known names that look most like `word`, the nearest first; empty when none does."""
    import difflib  # here: a command line that is right does without it

    return difflib.get_close_matches(word, list(names), n=limit, cutoff=0.6)


def _split(url: str, problem: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # the port is parsed only when it is read
    except ValueError:
        raise ValueError(problem) from None
    return parts
