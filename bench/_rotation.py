"""A log that is rotated as logrotate does it; for tests and for the chaos run."""

import gzip
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, TextIO

Style = Literal["create", "dateext", "copytruncate", "symlink"]
STYLES: Final[tuple[Style, ...]] = ("create", "dateext", "copytruncate", "symlink")


class RotatedLog:
    """`path` is the log. No copy is ever removed. `compress` packs all copies but the newest, as logrotate
    does with `delaycompress`."""

    def __init__(self, folder: Path, style: Style, *, compress: bool = False) -> None:
        self.path = folder / "app.log"
        self.style, self.compress = style, compress
        self.rotations = 0
        self.meanwhile: Callable[[], None] = lambda: None  # called between the steps of a rotation
        self._target = self.path
        if style == "symlink":
            self._target = folder / "target" / "0.log"
            self._target.parent.mkdir()
            self.path.symlink_to(self._target)
        self._file = self._opened()
        self._old: TextIO | None = None

    def _opened(self) -> TextIO:
        return self._target.open("a", buffering=1, encoding="utf-8")

    @property
    def has_old(self) -> bool:
        """The program has the file still open that it had before the last rotation."""
        return self._old is not None

    def append(self, text: str, *, late: bool = False) -> None:
        """`late`: into the old file, where there is one."""
        file = self._old if late and self._old is not None else self._file
        file.write(text)
        file.flush()

    def reopen(self) -> None:
        """Closes the old file, as after the signal of logrotate."""
        if self._old is not None:
            self._old.close()
            self._old = None

    def rotate(self) -> None:
        self.reopen()
        self.rotations += 1
        if self.style == "copytruncate":
            self._make_room()
            self._copy()
            os.truncate(self.path, 0)
        elif self.style == "symlink":
            self._old, self._target = self._file, self._target.with_name(f"{self.rotations}.log")
            self._file = self._opened()
            link = self.path.with_name("new-link")
            link.symlink_to(self._target)
            self.meanwhile()
            link.replace(self.path)
        else:
            self._make_room()
            self._old = self._file
            self.path.rename(self._first_copy())
            self.meanwhile()
            self._file = self._opened()
        self.meanwhile()
        if self.compress:
            self._pack()

    def _copy(self) -> None:
        data, made = self.path.read_bytes(), self._first_copy()
        with made.open("wb", buffering=0) as file:
            self.meanwhile()
            for part in (data[: len(data) // 2], data[len(data) // 2 :]):
                file.write(part)
                self.meanwhile()
        shutil.copystat(self.path, made)

    def _first_copy(self) -> Path:
        day, part = self.rotations // 24 + 1, self.rotations % 24
        ending = f"-202611{day:02}-{part:02}" if self.style == "dateext" else ".1"
        return self.path.with_name(self.path.name + ending)

    def _make_room(self) -> None:
        """Counts the names of numbered copies up."""
        if self.style == "dateext":
            return
        names = [(re.fullmatch(r"app\.log\.(\d+)(?:\.gz)?", p.name), p) for p in self.path.parent.iterdir()]
        for number, path in sorted(((int(match[1]), p) for match, p in names if match), reverse=True):
            path.rename(path.with_name(path.name.replace(f".{number}", f".{number + 1}", 1)))
            self.meanwhile()

    def _pack(self) -> None:
        plain = [p for p in self.path.parent.glob("app.log?*") if p.suffix != ".gz"]
        for path in plain:
            if path == self._first_copy():
                continue
            packed = path.with_name(path.name + ".gz")
            data = gzip.compress(path.read_bytes())
            with packed.open("wb", buffering=0) as file:
                for part in (data[: len(data) // 2], data[len(data) // 2 :]):
                    file.write(part)
                    self.meanwhile()
            shutil.copystat(path, packed)
            self.remove(path)
            self.meanwhile()

    def remove(self, path: Path) -> None:
        """The original of a packed copy."""
        path.unlink()

    def close(self) -> None:
        self.reopen()
        self._file.close()
