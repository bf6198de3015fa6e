"""The addresses at which the intake listens, such as `https://0.0.0.0:4318?cert=a.pem&key=a.key`.

The scheme names the protocol. A port that is left out is the usual one of its protocol.
"""

import functools
import ipaddress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qsl, urlencode, urlsplit

# The usual port of each scheme. Ports below 1024 need rights.
PORTS: Final = {
    "http": 4318, "https": 4318, "grpc": 4317, "grpcs": 4317,
    "syslog+udp": 5514, "syslog+tcp": 5514, "syslog+tls": 6514,
    "relp": 2514, "relps": 2515, "forward": 24224, "forwards": 24225,
}  # fmt: skip
ENCRYPTED: Final = frozenset({"https", "grpcs", "syslog+tls", "relps", "forwards"})
CERTIFICATES: Final = frozenset({"cert", "key", "ca"})
FILES: Final = (*sorted(CERTIFICATES), "secret")
# Protocols whose senders show a key of `logweir keys` with each request.
KEYED: Final = frozenset({"http", "https", "grpc", "grpcs"})
DEFAULT: Final = "http://127.0.0.1:4318"
API_DEFAULT: Final = "http://127.0.0.1:4380"
# Settings of listeners that speak no other protocol, and how to write them.
HTTP_ALONE: Final = {"api": API_DEFAULT, "gpu_serve": "http://127.0.0.1:4390"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One address. `cert` and `key`: PEM files, where the scheme is encrypted.

    `ca`: only clients with a certificate of this CA may send. `secret`: the file of forward's shared key.
    """

    scheme: str
    host: str
    port: int
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    secret: Path | None = None

    @classmethod
    def parse(cls, text: str, *, setting: str = "intake") -> Self:
        """`setting`: the name in sentences. Raises ValueError in one sentence."""
        url = urlsplit(text)
        if url.scheme not in PORTS:
            raise ValueError(f"{setting} {text!r} has an unknown scheme; use one of {', '.join(PORTS)}")
        try:
            port = PORTS[url.scheme] if url.port is None else url.port
            query = dict(parse_qsl(url.query, strict_parsing=bool(url.query)))
        except ValueError:
            raise ValueError(f"{setting} {text!r} is no address; write it like {DEFAULT}") from None
        files = {name: Path(query.pop(name)) for name in FILES if name in query}
        if not url.hostname or url.path.strip("/") or query or url.username is not None:
            raise ValueError(f"{setting} {text!r} is no address of a listener; write it like {DEFAULT}")
        if setting in HTTP_ALONE and url.scheme not in ("http", "https"):
            raise ValueError(f"{setting} {text!r} is not http or https; write it like {HTTP_ALONE[setting]}")
        encrypted = url.scheme in ENCRYPTED
        if encrypted != ({"cert", "key"} <= files.keys()) or (files.keys() & CERTIFICATES and not encrypted):
            wanted = "needs ?cert=FILE&key=FILE" if encrypted else "takes no certificate"
            raise ValueError(f"{setting} {text!r}: {url.scheme} {wanted}")
        if "secret" in files and not url.scheme.startswith("forward"):
            raise ValueError(f"{setting} {text!r}: {url.scheme} has no shared secret; that is of forward")
        if "ca" in files and url.scheme == "https":
            raise ValueError(
                f"{setting} {text!r}: https asks for no certificate of clients; make a key for each"
            )
        return cls(scheme=url.scheme, host=url.hostname, port=port, **files)

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return _is_loopback(self.host)

    @property
    def needs_key(self) -> bool:
        """Whether other machines reach it, and their senders show keys.

        Syslog, RELP and forward have no keys: whoever lets other machines reach them has said so."""
        return not self.loopback and self.scheme in KEYED

    @property
    def address(self) -> str:
        """Where senders on this machine find it."""
        host = self.host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        files = {name: str(path) for name, path in self._files().items()}
        return f"{self.scheme}://{host}:{self.port}" + (f"?{urlencode(files, safe='/')}" if files else "")

    def absolute(self) -> Self:
        """With files that a process in another directory finds."""
        files: dict[str, Any] = {name: path.absolute() for name, path in self._files().items()}
        return replace(self, **files)

    def _files(self) -> dict[str, Path]:
        found = {name: getattr(self, name) for name in FILES}
        return {name: path for name, path in found.items() if path is not None}


@functools.cache  # every request asks
def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
