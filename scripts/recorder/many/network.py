"""Packet loss for one process, made by the kernel: a socket filter that drops a share of what arrives.

The filter is classic BPF with the kernel's random number. It is attached from outside: pidfd_getfd(2) gives
the recorder a duplicate of each TCP socket of the process. A listening socket hands its filter down to the
connections that it accepts. TCP then retransmits, so what shows is what lost packets cause.
"""

import contextlib
import ctypes
import os
import platform
import socket
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

from recorder.software import Missing

_PIDFD_GETFD = 438  # the same number on every architecture
_CLONE_NEWNET = 0x40000000
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
_libc = ctypes.CDLL(None, use_errno=True)


def own_network() -> None:
    """Moves this process, and what it starts from now on, to a network of its own with a loopback only."""
    if platform.system() != "Linux" or os.geteuid() != 0:
        raise Missing("root on Linux is needed: the recorder uses a network of its own and drops packets")
    if _libc.unshare(_CLONE_NEWNET):
        raise Missing(f"unshare(CLONE_NEWNET) failed: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended between the two looks
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def lose_packets(pids: Iterable[int], share: float) -> None:
    """Drops `share` (0..1) of the packets that arrive at the TCP sockets of the processes; 0 ends it."""
    program = struct.pack("HBBI", 0x20, 0, 0, _RANDOM)  # A = random number
    program += struct.pack("HBBI", 0x35, 0, 1, int(share * 2**32))  # A >= share?
    program += struct.pack("HBBI", 0x06, 0, 0, 0xFFFFFFFF)  # then the whole packet
    program += struct.pack("HBBI", 0x06, 0, 0, 0)  # else nothing
    code = ctypes.create_string_buffer(program)
    attach = struct.pack("HxxxxxxQ", 4, ctypes.addressof(code))
    for pid in pids:
        for one in _sockets(pid):
            with one, contextlib.suppress(OSError):
                if share:
                    one.setsockopt(socket.SOL_SOCKET, _ATTACH, attach)
                else:
                    one.setsockopt(socket.SOL_SOCKET, _DETACH, 0)


def _sockets(pid: int) -> list[socket.socket]:
    """Duplicates of the TCP sockets of a process."""
    found: list[socket.socket] = []
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                if not _is_socket(entry):
                    continue
                number = _libc.syscall(_PIDFD_GETFD, handle, int(entry.name), 0)
                if number < 0:
                    continue  # it was closed between the two looks
                one = socket.socket(fileno=number)
                if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                    found.append(one)
                else:
                    one.close()
        finally:
            os.close(handle)
    return found


def _is_socket(entry: Path) -> bool:
    try:
        return str(entry.readlink()).startswith("socket:")
    except OSError:
        return False
