"""A program that writes numbered lines to a log that is rotated."""

import os
from pathlib import Path

from bench._rotation import RotatedLog, Style


class Program(RotatedLog):
    """`banner` begins each of its files, as of programs that say their version. `lines`: all that it
    wrote."""

    def __init__(self, folder: Path, style: Style, *, compress: bool = False, banner: str = "") -> None:
        super().__init__(folder, style, compress=compress)
        self.banner = banner
        self.lines: list[str] = []
        self._begin()

    def _begin(self) -> None:
        if self.banner:
            self._line(self.banner)

    def _line(self, text: str, *, late: bool = False) -> None:
        self.lines.append(text)
        self.append(text + "\n", late=late)

    def write(self, count: int = 1) -> None:
        for _ in range(count):
            self._line(f"line {len(self.lines):05} of a service that talks")

    def write_late(self, count: int = 1) -> None:
        """Into the file that it had before the last rotation, if it has not reopened its log yet."""
        for _ in range(count if self.has_old else 0):
            self._line(f"late {len(self.lines):05} of a service that talks", late=True)

    def rotate(self) -> None:
        super().rotate()
        if self.style != "copytruncate":
            self._begin()

    def remove(self, path: Path) -> None:
        """With a banner its inode is kept, because a later file with both would be taken for it."""
        if self.banner:
            (self.path.parent / "removed").mkdir(exist_ok=True)
            os.link(path, self.path.parent / "removed" / f"{self.rotations}-{path.name}")
        super().remove(path)
