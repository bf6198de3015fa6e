"""The files by which a listener speaks TLS."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. `client_ca`: only clients with a certificate of this CA may connect."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """As servers of asyncio take it. Raises BadInput."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as exc:
            names = ", ".join(str(path) for path in (self.cert, self.key, self.client_ca) if path)
            raise BadInput(
                f"a listener cannot speak TLS with {names} ({exc}); name readable PEM files"
            ) from exc
        return context
