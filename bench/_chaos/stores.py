"""Where the models and results of a chaos run lie: on the one machine, in a folder that all share, or in a
bucket of SeaweedFS behind a proxy."""

import os
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench import _weed
from bench._chaos.disk import Disk
from bench._chaos.http_proxy import HttpProxy
from bench._chaos.services import Services
from pipeline.store.choose import open_store
from pipeline.store.objects import probe

BUCKET: Final = "logweir-chaos"
SERVICE: Final = "store"
LOCAL, FILE, S3 = "local", "file", "s3"


class OnDisk:
    """A small disk: the results of one machine, or the folder that all machines share."""

    def __init__(self, folder: Path, *, shared: bool, mib: int, processes: Callable[[], list[int]]) -> None:
        self.path = folder / ("store" if shared else "results")
        self.disk = Disk(self.path, mib=mib, processes=processes)
        self.settings: dict[str, Any] = (
            {"store_url": self.path.as_uri()} if shared else {"results_dir": self.path}
        )
        self.env: dict[str, str] = {}
        self._away = False

    @property
    def kind(self) -> str:
        return self.disk.kind

    def start(self) -> None:
        self.disk.mount()

    def close(self) -> None:
        self.back()
        self.disk.unmount()

    def intact(self) -> bool:
        return not self._away

    def leave(self) -> bool:
        """The place is there without its content and takes none, as where nobody mounted the folder."""
        self._away = True
        command = ["mount", "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", str(self.path)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            self._away = False
        return self._away

    def back(self) -> None:
        if self._away:
            subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)
            self._away = False


class Bucket:
    """SeaweedFS; the product reaches it through a proxy, the bench past it."""

    def __init__(self, folder: Path, services: Services) -> None:
        weed = _weed.binary()
        if weed is None:
            raise RuntimeError("no SeaweedFS was found; set WEED to its binary, or run scripts/test once")
        self.kind = S3
        self.folder = folder / "weed"
        self.services = services
        self.ports = _weed.free_ports()
        self.proxy = HttpProxy(self.ports["s3"])
        self.settings: dict[str, Any] = {"store_url": f"s3://{BUCKET}/run"}
        self.env: dict[str, str] = {}
        self._weed = weed
        self._hurt = 0
        self._open = ExitStack()

    def start(self) -> None:
        self.folder.mkdir()
        self.services.add(SERVICE, _weed.command(self._weed, self.folder, self.ports), {})
        self.services.start(SERVICE)
        self._open.enter_context(self.proxy)
        self.env = _weed.environment(self.proxy.port)
        os.environ.update(_weed.environment(self.ports["s3"]))  # this process judges past the proxy
        self.services.wait(self._has_bucket, "the S3 server answers")

    def close(self) -> None:
        self._open.close()

    def intact(self) -> bool:
        return not self._hurt and self.answers()

    def hurt(self, by: int) -> None:
        """One more fault is at the server itself, or with -1 one less."""
        self._hurt += by

    def answers(self) -> bool:
        """Whether its port is open; one that stands still has it open too."""
        try:
            socket.create_connection(("127.0.0.1", self.ports["s3"]), timeout=1).close()
        except OSError:
            return False
        return True

    def serves(self) -> bool:
        """Whether it gives and takes objects: one that was killed begins with its volumes."""
        try:
            probe(open_store(f"s3://{BUCKET}/probe"))
        except Exception:  # noqa: BLE001 - whatever it says while it starts
            return False
        return True

    def _has_bucket(self) -> bool:
        try:
            _weed.make_bucket(BUCKET, self.ports["filer"])
        except OSError:
            return False
        return self.serves()


Store = Bucket | OnDisk
