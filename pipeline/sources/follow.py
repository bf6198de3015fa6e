"""Following a growing file by name, as `tail -F` does, through every way in which logs are rotated.

A follower holds the files that have had the name, oldest first, each with a place of its own. It reads an old
file until nothing was written to it for a while, because programs go on writing to it after the rotation.
Files that came and went between two looks are found by their rotated names, and what a truncation took away
in the copy that was made of it. A cursor names the places in all of these files.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Unpack

from pipeline.errors import BadInput
from pipeline.sources.chunks import Assembly, Chunk, Cursor, Limits, TextPlace
from pipeline.sources.flush_policy import FlushPolicy
from pipeline.sources.rotations import known_copies
from pipeline.sources.rotations.followed import FollowedFile
from pipeline.sources.rotations.rotated import (
    Copy,
    Inode,
    OpenText,
    entries,
    file_at,
    linked_names,
    rotated_copies,
    targets_between,
)

QUIET_S: Final = 60.0
# Each has a descriptor, and a place in the cursor that goes with each batch.
MOST_FILES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Lines that cannot be found any more, if there were any, and the cursor behind them."""

    sentence: str
    cursor: Cursor


class Follower:
    """The files of a name. Call `look` while a chunk waits somewhere, so that no file comes and goes
    unseen."""

    def __init__(
        self,
        path: Path,
        *,
        pace: FlushPolicy | None = None,
        quiet_s: float = QUIET_S,
        **limits: Unpack[Limits],
    ) -> None:
        """`quiet_s`: an old file is read until nothing was written to it for this time."""
        self._path = path
        self._assemble = partial(Assembly, **limits)
        self._pace = pace or FlushPolicy()
        self._quiet_s = quiet_s
        self._files: list[FollowedFile] = []  # oldest first
        self._read_out: deque[tuple[Inode, TextPlace]] = deque(maxlen=MOST_FILES)
        self._targets = linked_names(path)  # at the last look
        self._there: list[list[Copy]] | None = None  # copies at the last look
        self._changed = 0  # when the file of the name was last written to, as far as we saw; ns since 1970
        self._folders: dict[Path, int] = {}  # when they were last changed
        self._gaps: list[str] = []
        self.trouble = ""  # why the name has no file just now that can be read

    def chunks(
        self,
        start: Cursor | None = None,
        *,
        stop: Callable[[], bool],
        poll_s: float = 0.25,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[Chunk | Gap | None]:
        """Chunks by the flush policy until `stop()`; None after each poll without new bytes.

        The cursor of a chunk is one over all files of the name. The file may be missing for a while. A
        truncated or rewritten file is read from its start, after what a copy of it still has. A last line
        without newline waits for its newline, or until its file is read out; at `stop` it stays unread behind
        the cursor.

        Goes on at `start`, in files under any name that they have now, and then in those that came since.
        Called again, it keeps the files that are open. Raises BadInput for a directory and for compressed
        files."""
        self._begin(start)
        while not stop():
            self.look()
            yield from self._let_go()
            while self._gaps:
                yield Gap(sentence=self._gaps.pop(0), cursor=self._cursor())
            if self._files and (yield from self._advance()):
                continue  # more bytes wait: they fill chunks without flushes
            for file in list(self._files):
                yield from self._stamped(file, file.due())
            if not any(file.moved for file in self._files):
                yield None
            sleep(min((file.pace.poll_s(poll_s) for file in self._files), default=poll_s))
        for file in self._files:
            yield from self._stamped(file, file.flush())

    def close(self) -> None:
        for file in self._files:
            file.text.close()
        self._files = []

    def look(self) -> None:
        """Opens what has come to the name since the last look. Raises BadInput as `chunks` does."""
        for file in list(self._files):
            if not file.look():
                self._emptied(file)
        try:
            info = self._path.stat()
        except FileNotFoundError:  # renamed without a successor: writes to the old file still count
            self.trouble = f"waiting for {self._path} to appear"
            return
        except OSError as exc:
            self.trouble = f"waiting: {self._path} cannot be looked at ({exc.strerror})"
            return
        if self._path.is_dir():
            raise BadInput(f"{self._path} is a directory; follow one file in it")
        self.trouble, live = "", (info.st_dev, info.st_ino)
        self._open_new(live)
        if self._files and self._files[-1].inode == live:
            self._changed, self._targets = max(self._changed, info.st_mtime_ns), linked_names(self._path)

    # Chunks

    def _advance(self) -> Generator[Chunk, None, bool]:
        """Reads a block of each file, older files first; True when one has more."""
        for n, file in enumerate(list(self._files)):
            try:
                if file.has_much:  # its chunks do not wait, and the lines of older files come first
                    for older in self._files[:n]:
                        yield from self._stamped(older, older.release())
                yield from self._stamped(file, file.advance())
            except BadInput as exc:
                self._gaps.append(f"{exc}: its rest is lost")
                file.end()
            if file.behind:
                return True
        return False

    def _let_go(self) -> Iterator[Chunk]:
        """Ends the old files that cannot grow or have been quiet; the first one if too many are open."""
        for file in self._files[:-1]:
            quiet = self._pace.clock() - file.quiet_since >= self._quiet_s
            if file.is_read and (quiet or file.is_final or len(self._files) == MOST_FILES):
                yield from self._stamped(file, file.finish())
                if not file.over:
                    self._read_out.append((file.text.inode, file.place))
                file.text.close()
                self._files.remove(file)

    def _stamped(self, file: FollowedFile, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """The chunks of a file with cursors over all files."""
        for chunk in chunks:
            yield replace(chunk, cursor=self._cursor(file))

    def _cursor(self, file: FollowedFile | None = None) -> Cursor:
        """The places of all files, told from one of them or the newest."""
        if not self._files:
            return Cursor(path=str(self._path), identity="", changed=self._changed)
        at = self._files.index(file) if file is not None else len(self._files) - 1
        places = [one.place for one in self._files]
        return Cursor(
            path=str(self._path),
            target=str(self._targets[-1]) if len(self._targets) > 1 else "",
            older=tuple(places[:at]),
            newer=tuple(places[at + 1 :]),
            read_out=self._read_out[-1][1] if self._read_out else None,
            changed=self._changed,
            **places[at].own(),
        )

    # Where it begins

    def _begin(self, start: Cursor | None) -> None:
        """Opens the files of a cursor, and keeps those that are open and came later."""
        held, self._files, self._gaps = self._files, [], []
        self._there, self._folders = None, {}
        self._changed = start.changed if start is not None else 0
        if start is not None:
            if start.target:
                self._targets = (self._path, Path(start.target))
            self._read_out.clear()
            if (end := start.read_out) is not None:
                self._read_out.append((known_copies.inode_of(end), end))
            self._resume(start.places, held)
        self._keep_later(held, all_of_them=start is None)

    def _resume(self, places: Sequence[TextPlace], held: list[FollowedFile]) -> None:
        """Goes on at the places, each in the file itself, or else in whichever has its text now."""
        texts = [file.text for file in held if not file.over]
        there = [*(copy for group in self._groups() for copy in group), *file_at(self._path)]
        found = known_copies.find_all(places, texts, near=self._near(), there=there, changed=self._changed)
        self._files = [self._followed(found[n], places[n]) for n in sorted(found)]
        self._gaps += [
            f"the file that was {self._path} and was read to its line {place.line:,} is neither there nor under "
            "a rotated name: what followed that line, if anything, is lost"
            for n, place in enumerate(places)
            if n not in found and known_copies.had_text(place)
        ]

    def _keep_later(self, held: list[FollowedFile], *, all_of_them: bool) -> None:
        """Reads those of the open files from their beginning that came after the ones of a cursor."""
        resumed = [file.text for file in self._files]
        places = [n for n, file in enumerate(held) if file.text in resumed]
        later = held if all_of_them else held[places[-1] + 1 :] if places else []
        self._files += [self._followed(file.text) for file in later if not file.over]
        kept = [file.text for file in self._files]
        for file in held:
            if file.text not in kept:
                file.text.close()

    def _followed(self, text: OpenText, place: TextPlace | None = None) -> FollowedFile:
        place = place or TextPlace(identity=text.identity)
        cursor = Cursor(path=str(self._path), **place.own())
        return FollowedFile(text, cursor, self._assemble, self._pace.for_file())

    def _refuse_packed(self, text: OpenText) -> None:
        if text.packed:
            text.close()
            raise BadInput(
                f"{self._path} is compressed or UTF-16 and cannot be followed; read it without --follow"
            )

    # What came since

    def _open_new(self, live: Inode) -> None:
        """Opens files that came in between, and then the one that has the name now."""
        has_live = bool(self._files) and self._files[-1].inode == live
        if has_live and not self._folders_changed():
            return
        if (groups := self._groups()) == self._there and has_live:
            return
        self._there = None
        if self._files and not has_live:  # it is an old file from now on
            self._files[-1].quiet_since = self._pace.clock()
        self._reopen([copy for group in groups for copy in group])
        for copy in self._unknown(groups):
            if len(self._files) == MOST_FILES:  # they are found again when there is room
                return
            if (text := known_copies.open_text(copy.path)) is None:
                if not copy.path.exists():  # renamed once more, which the next look sees
                    return
                self._gaps.append(f"{copy.path} cannot be opened: its lines are lost")
            elif has_live and known_copies.is_part(text, self._files[-1].text):
                text.close()  # a copy in the making, before a truncation
            elif has_live and not self._files[-1].look():
                text.close()  # truncated just now, and this is its copy, which the next look sees
                return
            else:
                self._files.insert(len(self._files) - has_live, self._followed(text))
        self._there = groups
        if not has_live and len(self._files) < MOST_FILES:
            self._open_live(live)

    def _folders_changed(self) -> bool:
        """True where a file may have come to the folders since the last look, or gone."""
        before = self._folders
        self._folders = {}
        for path in self._targets:
            with contextlib.suppress(OSError):
                self._folders[path.parent] = path.parent.stat().st_mtime_ns
        return self._folders != before

    def _unknown(self, groups: list[list[Copy]]) -> list[Copy]:
        near = {entry.inode: entry for entry in self._near()}
        inodes = {file.inode for file in self._files if file.inode is not None}
        closed = [(inode, place) for inode, place in self._read_out if inode not in inodes]
        still = {inode for inode, place in closed if _is_still(near.get(inode), place)}
        found = [
            copy
            for group in groups
            for copy in known_copies.copies_since(
                group,
                inodes=inodes | still,
                gone=[f.text for f in self._files if not f.is_final and f.inode not in near],
                ends=[place for inode, place in closed if inode not in still],
                changed=self._changed,
            )
        ]
        return [copy for copy in {copy.inode: copy for copy in found}.values() if copy.inode not in inodes]

    def _open_live(self, live: Inode) -> None:
        again = next((file for file in self._files if file.inode == live), None)
        if again is not None:  # an old file got its name back
            self._files.remove(again)
            self._files.append(again)
            return
        if (text := known_copies.open_text(self._path)) is None:
            self.trouble = f"waiting: {self._path} cannot be opened"
            return
        self._refuse_packed(text)
        if text.inode != live:  # rotated just now, which the next look sees
            text.close()
            return
        place = next((p for inode, p in self._read_out if inode == live and text.is_file_of(p)), None)
        self._files.append(self._followed(text, place))

    def _reopen(self, there: list[Copy]) -> None:
        """Files that were written to after they were read out."""
        taken = [file.inode for file in self._files]
        for inode, place in list(self._read_out):
            grown = next((c for c in there if c.inode == inode and c.size > place.offset), None)
            if grown is None or inode in taken or len(self._files) == MOST_FILES:
                continue
            if (text := known_copies.open_text(grown.path)) is None:
                continue
            if not text.packed and text.is_file_of(place):
                self._read_out.remove((inode, place))
                self._files.append(self._followed(text, place))
            else:
                text.close()

    def _near(self) -> list[Copy]:
        """All files of the folders."""
        folders = {path.parent for path in (*self._targets, *linked_names(self._path))}
        return [entry for folder in folders for entry in entries(folder)]

    def _groups(self) -> list[list[Copy]]:
        """The files that may have had the name, oldest first, and not the one that has it: its copies, and
        those of the target that it had as a link and has now."""
        old, new = self._targets[-1], linked_names(self._path)[-1]
        groups = [rotated_copies(self._path)]
        if old != self._path:
            groups.append([*rotated_copies(old), *file_at(old)])
        if new != old:
            groups += [targets_between(old, new), rotated_copies(new)]
        live = {copy.inode for copy in file_at(self._path)}
        return [[copy for copy in group if copy.inode not in live] for group in groups]

    def _emptied(self, file: FollowedFile) -> None:
        """Reads on in the copy that was made before a truncation."""
        if file.is_unread:  # the copy is found as a new one
            self._files.remove(file)
            file.end()
            return
        taken = [one.inode for one in self._files]
        for copy in (copy for group in self._groups() for copy in reversed(group)):
            if copy.inode in taken or (text := known_copies.open_text(copy.path)) is None:
                continue
            if file.is_copied_to(text):
                file.go_on_in(text)
                return
            text.close()
        self._gaps.append(
            f"{self._path} was emptied and no copy of it is there: lines of its last moments are lost, if there "
            "were any"
        )
        file.end()


def _is_still(copy: Copy | None, place: TextPlace) -> bool:
    """True for the very file that ended at this place."""
    return known_copies.is_open_and(copy, lambda text: text.is_file_of(place))
