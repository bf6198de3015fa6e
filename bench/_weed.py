"""SeaweedFS, an S3 server for tests and benchmarks: its command, its keys, its ports."""

import json
import os
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final

KEY, SECRET = "logweir-test", "logweir-test-secret"
FETCHED: Final = Path(__file__).resolve().parents[1] / ".venv" / "seaweedfs" / "bin" / "weed"
ACTIONS: Final = ("Admin", "Read", "Write", "List", "Tagging")


def binary() -> str | None:
    """WEED, the one in PATH, or the one that scripts/test fetched."""
    return os.environ.get("WEED") or shutil.which("weed") or (str(FETCHED) if FETCHED.exists() else None)


def command(weed: str, folder: Path, ports: Mapping[str, int]) -> list[str]:
    """Of a server with all its data in this folder; it listens on loopback only."""
    config = folder / "s3.json"
    keys = [{"accessKey": KEY, "secretKey": SECRET}]
    config.write_text(json.dumps({"identities": [{"name": "test", "credentials": keys, "actions": ACTIONS}]}))
    return [
        weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={ports['master']}", f"-volume.port={ports['volume']}",
        "-filer", f"-filer.port={ports['filer']}", "-volume.max=100",
        "-master.volumeSizeLimitMB=64", "-s3", f"-s3.port={ports['s3']}",
        # Services that nobody asks here, on ports that are the same for every server.
        "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-s3.config={config}",
    ]  # fmt: skip


def environment(port: int) -> dict[str, str]:
    """The variables by which a process reaches it."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def make_bucket(name: str, filer_port: int) -> None:
    """By the filer, where a bucket is a folder below /buckets. Raises OSError."""
    request = urllib.request.Request(f"http://127.0.0.1:{filer_port}/buckets/{name}/", method="POST")
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except urllib.error.HTTPError as exc:
        if exc.code != 409:  # it is there since an earlier try
            raise


def free_ports() -> dict[str, int]:
    """Ports whose number plus 10,000 is a port too: SeaweedFS takes that one for gRPC."""
    found: list[int] = []
    while len(found) < 4:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
        small = 20_000 + port % 10_000
        try:
            for each in (small, small + 10_000):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        if small not in found:
            found.append(small)
    return dict(zip(("master", "volume", "filer", "s3"), found, strict=True))
