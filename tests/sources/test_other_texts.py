"""Which texts of a folder are not logs, by how they are built."""

import gzip
import io
import lzma
import tarfile
from pathlib import Path

import pytest

from pipeline.errors import BadInput
from pipeline.sources.files import choose
from pipeline.sources.other_texts import MANUAL, PACKAGES, PROSE, other_archive, other_text

LOG = "".join(f"2026-11-20 10:00:{second:02} INFO order {second} stored\n" for second in range(30))
PAGE = r""".\" made by hand
.TH FERRY 1 "2026-04-01 08:00" "harbour 3.1" "User Commands"
.SH NAME
ferry \- abort a crossing
.SH SYNOPSIS
.B ferry
[\fIoption\fR]...
.SH DESCRIPTION
The crossing is aborted, and the error is shown.
"""
BSD_PAGE = ".Dd May 4, 2026\n.Dt FERRY 8\n.Os\n.Sh NAME\n.Nm ferry\n.Nd abort a crossing\n"
ALIAS = ".so man1/ferry.1\n"
SOLVER = "Request: EIPP 0.1\nArchitecture: amd64\nPlanner: internal\n\n" + "".join(
    f"Package: ferry{n}\nArchitecture: amd64\nVersion: 1:{n}.2-3\nAPT-ID: {n}\nStatus: installed\n"
    f"Depends: libc6 (>= 2.34)\nConflicts: raft (<< {n})\n\n"
    for n in range(900)
)
DETAILS = "".join(
    f"Name         : ferry{n}\nVersion      : {n}.2\nRequires     : glibc\n               zlib\n\n"
    for n in range(9)
)
GREETING = """You are looking for the log of the ferry, and you wonder why there is no such
file here?

The ferry has written to the journal of the harbour since its second edition. To
read it, call the journal with the name of the ferry, and it shows the lines of
today. The old file is kept for another year on the tape that the harbour sends
to the archive each winter.

Thank you!
"""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (PAGE, MANUAL),
        (BSD_PAGE, MANUAL),
        (ALIAS, MANUAL),
        (SOLVER, PACKAGES),
        (SOLVER.replace("Package:", "Paket:"), PACKAGES),  # by the structure
        (DETAILS, PACKAGES),
        (GREETING, PROSE),
    ],
)
def test_what_is_not_a_log_is_recognised_by_its_structure(text: str, kind: str) -> None:
    assert other_text(text.encode()) == kind


_EVENT = (
    "Start-Date: 2026-05-0{0}  10:00:0{0}\nCommandline: apt upgrade\nUpgrade: ferry (1, 2)\nEnd-Date: x\n\n"
)


@pytest.mark.parametrize(
    "text",
    [
        LOG,
        "".join(_EVENT.format(n) for n in range(1, 9)),
        "".join(f"Level: error\nUnit: ferry\nText: crossing {n}\n\n" for n in range(9)),
        "".join(f"crossing of the ferry number {n} is over and all is well\n" for n in range(90)),
        "checking for gcc... gcc\nchecking whether the compiler works... yes\n" * 20,
        "ERROR ferry is lost\n" + GREETING,  # a level at the beginning of a line
        GREETING + "2026-11-20 10:00:00 ready\n",
        "Name: ferry\nVersion: 1\nRequires: glibc\n",  # one stanza may be anything
        "Warning: mast is low\nWarning: sail is wet\n\n" * 9,
        ".dotfile was written\n.cache was cleared\n" * 9,
        "/usr/share/fonts: caching, new cache contents: 0 fonts, 1 dirs\n" * 9,
        "",
    ],
)
def test_all_other_text_may_be_a_log(text: str) -> None:
    assert other_text(text.encode()) == ""


def test_an_archive_is_taken_for_logs_by_one_member_with_times_or_levels() -> None:
    source = b"int main(void)\n{\n    return 0;\n}\n" * 9
    assert other_archive([source, PAGE.encode()]) == "package or source archive"
    assert other_archive([source, LOG.encode()]) == ""
    assert other_archive([b"WARN mast is low\n"]) == ""


def packed(members: dict[str, str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return made.getvalue()


def test_a_folder_leaves_such_files_out_with_one_note_and_a_named_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "app.log").write_text(LOG)
    (tmp_path / "dump.log.xz").write_bytes(lzma.compress(SOLVER.encode()))
    (tmp_path / "ferry.1.gz").write_bytes(gzip.compress(PAGE.encode()))
    (tmp_path / "ferry.8").write_text(BSD_PAGE)
    (tmp_path / "ferry-3.1.tar.gz").write_bytes(
        packed({"f/ferry.c": "int main(void);\n" * 9, "f/ferry.1": PAGE})
    )
    (tmp_path / "logs.tar.gz").write_bytes(packed({"README": GREETING, "ferry.log": LOG}))
    chosen = choose([str(tmp_path)])
    assert [path.name for path in chosen.paths] == ["app.log", "logs.tar.gz"]
    assert chosen.notes == (
        "left out 4 files whose content is not a log (2 manual pages, 1 package list, 1 package or source "
        f"archive): {tmp_path}/dump.log.xz, {tmp_path}/ferry-3.1.tar.gz and 2 more; a file that is named "
        "itself is read",
    )
    assert choose([f"{tmp_path}/*.log*"]).paths == (tmp_path / "app.log",)
    named = choose([str(tmp_path / "dump.log.xz"), str(tmp_path)])
    assert [path.name for path in named.paths] == ["dump.log.xz", "app.log", "logs.tar.gz"]
    with pytest.raises(BadInput, match="has no text log; of 1 file none is one"):
        choose([f"{tmp_path}/*.8"])


def test_what_is_no_text_and_what_is_not_a_log_have_a_note_each(tmp_path: Path) -> None:
    (tmp_path / "app.log").write_text(LOG)
    (tmp_path / "btmp").write_bytes(b"\1\0\0\0" * 96)
    (tmp_path / "README").write_text(GREETING)
    assert choose([str(tmp_path)]).notes == (
        f"skipped 1 file that is no text log: {tmp_path}/btmp",
        f"left out 1 file whose content is not a log (1 explanatory text): {tmp_path}/README; a file that is "
        "named itself is read",
    )
