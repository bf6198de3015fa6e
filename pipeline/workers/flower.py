"""`python -m pipeline.workers.flower [FLOWER OPTIONS]`: Flower on the pipeline's own broker settings.

Flower shows events, which Redis may lose: it is for looking, the ledger is for counting. Off loopback it refuses to
start without authentication.
"""

import sys
from collections.abc import Sequence
from typing import Final

from pipeline.app import make_app
from pipeline.errors import BadInput
from pipeline.settings import Settings

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
AUTH: Final = ("--basic_auth", "--basic-auth", "--auth=", "--oauth2")


def arguments(argv: Sequence[str], *, has_auth: bool) -> list[str]:
    """Flower's arguments with ours in front. Raises BadInput for an open door off loopback."""
    address = next((a.split("=", 1)[1] for a in argv if a.startswith("--address=")), LOOPBACK[0])
    guarded = has_auth or any(a.startswith(AUTH) for a in argv)
    if address not in LOOPBACK and not guarded:
        raise BadInput(
            f"Flower on {address} needs authentication; set FLOWER_BASIC_AUTH=user:password or use --address=127.0.0.1"
        )
    return ["flower", f"--address={address}", *(a for a in argv if not a.startswith("--address="))]


def main(argv: Sequence[str]) -> int:
    settings = Settings.load()
    try:
        args = arguments(argv, has_auth=settings.flower_auth is not None)
    except BadInput as exc:
        sys.stderr.write(f"logweir: {exc}\n")
        return 2
    make_app(settings).start(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
