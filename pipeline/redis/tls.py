"""TLS to Redis and to sentinels: the options of REDIS_URL as arguments, and failures with their remedies."""

import ssl
from collections.abc import Mapping
from typing import Any, Final

VERIFY: Final = {"required": ssl.CERT_REQUIRED, "optional": ssl.CERT_OPTIONAL, "none": ssl.CERT_NONE}
_UNTRUSTED: Final = "shows no certificate that can be trusted"
_ASKS: Final = "wants a certificate of ours"
_NO_TLS: Final = "does not speak TLS"
_HANGS_UP: Final = "hangs up"
_NO_FILE: Final = "cannot be asked: a file that REDIS_URL names for TLS is not there"
# Each failure, and what to do about it.
REMEDIES: Final[Mapping[str, str]] = {
    _UNTRUSTED: "name its CA with ?ssl_ca_certs=FILE in REDIS_URL",
    _ASKS: "name it with ssl_certfile and ssl_keyfile in REDIS_URL",
    _NO_TLS: "write redis:// in REDIS_URL, or sentinel:// for sentinels",
    _HANGS_UP: "write rediss:// in REDIS_URL where it speaks TLS only, or sentinels:// for sentinels",
    _NO_FILE: "correct its ssl_ options",
}


def tls_arguments(options: Mapping[str, str]) -> dict[str, Any]:
    """The ssl_ options of a URL as redis-py, kombu and Flower take them.

    As in redis-py, the server's certificate and name are verified unless the URL says otherwise."""
    verify = VERIFY[options.get("ssl_cert_reqs", "required")]
    named = options.get("ssl_check_hostname", "true").lower() not in ("0", "f", "false", "n", "no")
    return dict(options) | {
        "ssl_cert_reqs": verify,
        "ssl_check_hostname": named and verify is not ssl.CERT_NONE,
    }


def failure(text: str, *, tls: bool) -> str:
    """The failure behind an error of a connection, a key of REMEDIES; "" where TLS is not its cause."""
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return _UNTRUSTED
    if "certificate required" in text.lower() or "handshake failure" in text.lower():
        return _ASKS
    if tls and any(
        word in text for word in ("WRONG_VERSION_NUMBER", "wrong version number", "record layer failure")
    ):
        return _NO_TLS
    if not tls and any(word in text for word in ("Connection closed by server", "Connection reset")):
        return _HANGS_UP
    return _NO_FILE if tls and "Error 2 " in text else ""  # ENOENT


def remedy_in(text: str) -> str:
    """The remedy of the failure that a sentence names; "" where it names none."""
    return next((found for words, found in REMEDIES.items() if words in text), "")
