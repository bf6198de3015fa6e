"""Certificates made on the fly, a door with TLS in front of a Redis that has none, and a Redis with TLS."""

import contextlib
import os
import select
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """A CA, what a server of the name localhost shows, and what a client shows. Each key lies beside its
    certificate."""

    folder: Path

    def __getattr__(self, name: str) -> Path:
        """`ca`, `server`, `client`."""
        return self.folder / f"{name}.crt"

    @classmethod
    def make(cls, folder: Path) -> "Certificates":
        """By the openssl command: a day long, elliptic keys because they are made at once."""

        def run(*args: str) -> None:
            subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        run("req", "-x509", *key, "-days", "1", "-subj", "/CN=test CA", "-keyout", "ca.key", "-out", "ca.crt")
        (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        for name in ("server", "client"):
            run("req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
            run(
                *(
                    "x509",
                    "-req",
                    "-in",
                    f"{name}.csr",
                    "-CA",
                    "ca.crt",
                    "-CAkey",
                    "ca.key",
                    "-CAcreateserial",
                ),
                *("-days", "1", "-extfile", "names", "-out", f"{name}.crt"),
            )
        return cls(folder=folder)

    def shown(self) -> dict[str, str]:
        """The files by which redis-py trusts a server and is trusted by it."""
        return {
            "ssl_ca_certs": str(self.ca),
            "ssl_certfile": str(self.client),
            "ssl_keyfile": str(self.client.with_suffix(".key")),
        }


def tls_server(folder: Path) -> Path:
    """A Redis or Valkey that was built with TLS; the server of the wheel was not. Skips the test without.

    Debian's redis-tools ship the server as redis-check-rdb, which is a server under any other name."""
    names = [os.environ.get("TLS_REDIS", ""), "redis-server", "valkey-server", "redis-check-rdb"]
    for name in filter(None, names):
        found = shutil.which(name)
        if found and b"SSL_CTX_new" in Path(found).read_bytes():
            place = folder / "redis-server"
            folder.mkdir(exist_ok=True)
            if not place.is_symlink():
                place.symlink_to(Path(found).resolve())
            return place
    pytest.skip("no Redis with TLS here: set TLS_REDIS to one, or install redis-tools of Debian or Ubuntu")


def tls_lines(port: int, made: Certificates) -> list[str]:
    """For the configuration of a server or sentinel that speaks TLS alone, to its peers too."""
    shown = made.server
    return [
        "port 0", f"tls-port {port}", "tls-replication yes", "tls-auth-clients optional",
        f"tls-cert-file {shown}", f"tls-key-file {shown.with_suffix('.key')}", f"tls-ca-cert-file {made.ca}",
    ]  # fmt: skip


@contextlib.contextmanager
def tls_door(place: str | tuple[str, int], made: Certificates, *, ask: bool = False) -> Iterator[int]:
    """A port of this machine that speaks TLS and hands on to the server on a unix socket or at an address;
    `ask`: clients show theirs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server, made.server.with_suffix(".key"))
    if ask:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(made.ca)
    with socket.create_server(("0.0.0.0", 0), backlog=64) as door:
        open_lines: set[socket.socket] = set()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, _ = door.accept()
                    open_lines.add(line)
                    threading.Thread(target=_carry, args=(line, context, place), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield door.getsockname()[1]
        door.shutdown(socket.SHUT_RDWR)
        for line in open_lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)


def _carry(line: socket.socket, context: ssl.SSLContext, place: str | tuple[str, int]) -> None:
    """Bytes of one connection, both ways, until one side hangs up."""
    kind = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(kind) as server, line:
        server.connect(place)
        with context.wrap_socket(line, server_side=True) as client:
            while True:
                # What TLS has unpacked already is not seen by select.
                ready = [client] if client.pending() else select.select([client, server], [], [])[0]
                for source, sink in ((client, server), (server, client)):
                    if source in ready:
                        data = source.recv(65536)
                        if not data:
                            return
                        sink.sendall(data)
