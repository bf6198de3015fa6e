"""Which rotated copies a follower knows, and which came since.

A copy is known by its inode. One that was packed or copied is known by its text, because its inode went with
the original. Files may begin alike, so a text is only asked about where the inode is gone.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.errors import BadInput
from pipeline.sources.chunks import TextPlace
from pipeline.sources.rotations.rotated import Copy, Inode, OpenText


def open_text(path: Path) -> OpenText | None:
    """None for a file that has just gone, or may not be read."""
    try:
        return OpenText(path)
    except BadInput:
        return None


def find_all(
    places: Sequence[TextPlace],
    texts: Sequence[OpenText],
    *,
    near: Sequence[Copy],
    there: Sequence[Copy],
    changed: int,
) -> dict[int, OpenText]:
    """Open files by the number of their place: the file itself, else whichever has its text now.

    `texts`: files that are open. `near`: all files of the folders. `there`: those of the name, oldest first.
    `changed`: as for `copies_since`."""
    found: dict[int, OpenText] = {}
    with_text = [n for n, place in enumerate(places) if had_text(place)]
    for n in with_text:
        if text := _itself(places[n], texts, near):
            found[n] = text
    names = {entry.inode for entry in near}
    nameless = [text for text in texts if text.inode not in names]
    for n in reversed([n for n in with_text if n not in found]):
        taken = {text.inode for text in found.values()}
        text = next((one for one in nameless if one.inode not in taken and one.is_copy_of(places[n])), None)
        older = sum(m < n and m not in found for m in with_text)
        left = [copy for copy in _between(there, found, n) if copy.inode not in taken]
        if text := text or _likeliest(left, places[n], older=older, changed=changed):
            found[n] = text
    # A file that was empty has its inode alone, which another one may have by now.
    for n in [n for n in range(len(places)) if n not in with_text]:
        others = {copy.inode for copy in there} - {copy.inode for copy in _between(there, found, n)}
        if text := _itself(places[n], texts, [entry for entry in near if entry.inode not in others]):
            found[n] = text
    return found


def _likeliest(copies: Sequence[Copy], place: TextPlace, *, older: int, changed: int) -> OpenText | None:
    """Of several copies that begin alike, the oldest that was written to since `changed`, because later files
    came after it; else the newest. `older`: places that need a copy before it."""
    alike = [copy for copy in copies if is_open_and(copy, lambda text: text.is_copy_of(place))]
    alike = alike[min(older, len(alike) - 1) :] if alike else []
    later = [copy for copy in alike if copy.changed >= changed]
    chosen = later[:1] or alike[-1:]
    return open_text(chosen[0].path) if chosen else None


def _itself(place: TextPlace, texts: Sequence[OpenText], near: Sequence[Copy]) -> OpenText | None:
    if (held := next((text for text in texts if text.is_file_of(place)), None)) is not None:
        return held
    for copy in near:
        if copy.inode == inode_of(place) and (text := open_text(copy.path)) is not None:
            if text.is_file_of(place):
                return text
            text.close()
    return None


def _between(there: Sequence[Copy], found: Mapping[int, OpenText], n: int) -> list[Copy]:
    """The files that may be the n-th, by the order of those that were found."""
    at = {copy.inode: position for position, copy in enumerate(there)}
    first = max((at.get(text.inode, -1) for m, text in found.items() if m < n), default=-1)
    last = min((at.get(text.inode, len(there)) for m, text in found.items() if m > n), default=len(there))
    return list(there[first + 1 : last])


def is_open_and(copy: Copy | None, is_it: Callable[[OpenText], bool]) -> bool:
    """The answer for a copy; False where it cannot be opened."""
    if copy is None or (text := open_text(copy.path)) is None:
        return False
    with contextlib.closing(text):
        return is_it(text)


def inode_of(place: TextPlace) -> Inode:
    """The inode in the identity of a file; (0, 0) for a source without one."""
    try:
        device, number, *_ = place.identity.split(":")
        return int(device, 16), int(number, 16)
    except ValueError:
        return 0, 0


def had_text(place: TextPlace) -> bool:
    """False for a place in a file that was empty, and for that of no file."""
    return len(parts := place.identity.split(":")) == 4 and parts[2] != "0"


def copies_since(
    group: Sequence[Copy],
    *,
    inodes: Collection[Inode],
    gone: Sequence[OpenText],
    ends: Sequence[TextPlace],
    changed: int,
) -> list[Copy]:
    """The copies that came after the newest known one. Without any, those written to since `changed`, in ns
    since 1970; 0: none.

    `group`: copies of one name, oldest first. `inodes`: of the files that are known. `gone`: open files
    that no name has any more. `ends`: where files ended that were closed."""
    known = max((n for n, copy in enumerate(group) if copy.inode in inodes), default=-1)
    whole = part = -1
    waiting: list[TextPlace | OpenText] = [*ends, *gone]
    for n, text in _opened_from(group, known + 1) if waiting else ():
        at = next((at for at, one in enumerate(waiting) if _is_whole(text, one)), None)
        if at is not None:  # equal texts are copies of one file after another
            whole, waiting = n, waiting[at + 1 :]
        elif text.size and any(
            is_part(text, one) for one in gone
        ):  # packed before the last lines were written
            part = n
    known = max(known, whole if whole >= 0 else part)
    if known >= 0:
        return list(group[known + 1 :])
    return [copy for copy in group if changed and copy.changed >= changed]


def _is_whole(text: OpenText, of: TextPlace | OpenText) -> bool:
    if isinstance(of, TextPlace):
        return text.is_copy_of(of) and text.size == of.offset
    return 0 < text.size == of.size and is_part(text, of)


def is_part(text: OpenText, of: OpenText) -> bool:
    """True for a text that the other one begins with, also for none at all."""
    size = text.size
    try:
        begins = size <= of.size and of.head.startswith(text.head[:size])
        return begins and text.tail(size) == of.tail(size)
    except BadInput:  # damage
        return False


def _opened_from(group: Sequence[Copy], first: int) -> Iterator[tuple[int, OpenText]]:
    for n, copy in enumerate(group[first:], first):
        if (text := open_text(copy.path)) is not None:
            with contextlib.closing(text):
                yield n, text
