"""The log folder of a healthy Debian server, made up line by line in the formats of its programs."""

import gzip
import json
import lzma
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

HOST: Final = "harbour"
ARCHITECTURES: Final = ("amd64", "amd64", "amd64", "all")
_STEMS: Final = [
    "curl",
    "libcurl4",
    "openssl",
    "libssl3",
    "tzdata",
    "base-files",
    "bash",
    "git",
    "vim-common",
    "perl-base",
    "python3.11",
    "libexpat1",
    "krb5-locales",
    "libgpg-error0",
    "liberror-perl",
    "fail2ban",
    "crash",
    "ruby-error-highlight",
    "linux-image-6.1.0-32",
    "linux-libc-dev",
    "libxml2",
    "libpq5",
    "postgresql-15",
    "nginx",
    "openssh-server",
    "openssh-client",
    "sudo",
    "systemd",
    "libsystemd0",
    "udev",
    "libudev1",
    "ca-certificates",
    "less",
    "rsync",
    "rsyslog",
    "logrotate",
    "man-db",
    "mdadm",
    "ncurses-base",
    "libncurses6",
    "apt",
    "libapt-pkg6.0",
    "dpkg",
    "debconf",
    "gnupg",
    "gpgv",
    "python3-urllib3",
    "python3-idna",
    "unattended-upgrades",
    "libsqlite3-0",
    "liblzma5",
    "zlib1g",
]
_TRIGGERS: Final = ("man-db (2.11.2-2)", "libc-bin (2.36-9+deb12u10)", "dbus (1.14.10-1~deb12u1)")
_PROGRESS: Final = "".join(f"(Reading database ... {percent}%\r" for percent in range(5, 101, 5))
_PEOPLE: Final = ("anna", "bernd", "chen")
MANUAL: Final = r""".\" Title: ABORT
.TH "ABORT" "7" "2026" "PostgreSQL 15" "PostgreSQL 15 Documentation"
.SH "NAME"
ABORT \- abort the current transaction
.SH "SYNOPSIS"
.nf
ABORT [ WORK | TRANSACTION ]
.fi
.SH "DESCRIPTION"
.PP
\fBABORT\fR
ends the transaction, and all of its changes are lost\&.
"""
README: Final = """The text files that you may look for in this folder are not written any more, and
the journal has taken their place.

It keeps what they held and more, for as long as the disk has room, and it shows
the lines of a service, of a boot, or of an hour. Ask it with the command of the
same name, which needs no configuration. Whoever wants the old files back should
install one of the classic services, which writes them from the journal, so that
both live side by side.
"""


class Machine:
    """One machine over some weeks. The same seed, begin and number of days give the same folder."""

    def __init__(self, seed: int, begins: datetime, days: int) -> None:
        self._draw, self._begins, self._days = random.Random(seed), begins, days
        self._versions = dict.fromkeys(_STEMS, 3)
        self._built_for = {name: random.Random(name).choice(ARCHITECTURES) for name in _STEMS}

    def write(self, folder: Path) -> None:
        """All files of the folder."""
        apt = folder / "apt"
        apt.mkdir(parents=True)
        dpkg, history, term = self._upgrades()
        files = {
            "dpkg.log": dpkg,
            "apt/history.log": history,
            "apt/term.log": term,
            "alternatives.log": self._alternatives(),
            "auth.log": self._auth(),
            "journal.json": self._journal(),
        }
        for name, lines in files.items():
            (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        (apt / "eipp.log.xz").write_bytes(lzma.compress("\n".join(self._solver()).encode()))
        (folder / "ABORT.7.gz").write_bytes(gzip.compress(MANUAL.encode(), mtime=0))
        (folder / "README").write_text(README, encoding="utf-8")
        for name in ("btmp", "wtmp"):
            (folder / name).write_bytes(b"\7\0\0\0" * 96)
        (folder / "faillog").touch()

    def _moment(self, day: int, hour: int, minutes: int = 50) -> datetime:
        seconds = self._draw.randrange(minutes * 60)
        return self._begins + timedelta(days=day, hours=hour, seconds=seconds)

    def _version(self, name: str, number: int) -> str:
        draw = random.Random(name)
        return f"{draw.randrange(1, 9)}.{draw.randrange(30)}.{draw.randrange(9)}-{draw.randrange(1, 5)}+deb12u{number}"

    def _upgrades(self) -> tuple[list[str], list[str], list[str]]:
        dpkg: list[str] = []
        history: list[str] = []
        term: list[str] = []
        for day in range(self._days):
            if self._draw.random() < 0.4:
                continue
            names = sorted(self._draw.sample(_STEMS, self._draw.randrange(1, 9)))
            at = self._moment(day, 6)
            self._upgrade(names, at, dpkg, history, term)
        return dpkg, history, term

    def _upgrade(
        self, names: list[str], at: datetime, dpkg: list[str], history: list[str], term: list[str]
    ) -> None:
        stamp = at.strftime("%Y-%m-%d  %H:%M:%S")
        changes = []
        history += ["", f"Start-Date: {stamp}", "Commandline: /usr/bin/unattended-upgrade"]
        term += ["", f"Log started: {stamp}"]
        dpkg.append(f"{at:%Y-%m-%d %H:%M:%S} startup archives unpack")
        count = 61_000 + self._draw.randrange(900)
        term.append(f"(Reading database ... \r{_PROGRESS}(Reading database ... {count} files and directories "
                    "currently installed.)")  # fmt: skip
        for number, name in enumerate(names):
            old, new = (self._version(name, self._versions[name] + more) for more in (0, 1))
            self._versions[name] += 1
            full = f"{name}:{self._built_for[name]}"
            changes.append(f"{full} ({old}, {new})")
            when = f"{at + timedelta(seconds=number):%Y-%m-%d %H:%M:%S}"
            dpkg += [
                f"{when} upgrade {full} {old} {new}",
                *(
                    f"{when} status {s} {full} {old}"
                    for s in ("half-configured", "unpacked", "half-installed")
                ),
                f"{when} status unpacked {full} {new}",
            ]
            term += [
                f"Preparing to unpack .../{number}-{name}_{new}_{self._built_for[name]}.deb ...",
                f"Unpacking {full} ({new}) over ({old}) ...",
            ]
        at += timedelta(seconds=len(names))
        dpkg.append(f"{at:%Y-%m-%d %H:%M:%S} startup packages configure")
        for name in names:
            new, full = self._version(name, self._versions[name]), f"{name}:{self._built_for[name]}"
            at += timedelta(seconds=1)
            when = f"{at:%Y-%m-%d %H:%M:%S}"
            dpkg.append(f"{when} configure {full} {new} <none>")
            dpkg += [f"{when} status {s} {full} {new}" for s in ("unpacked", "half-configured", "installed")]
            term += [f"Setting up {full} ({new}) ...", *self._says(name)]
        for trigger in self._draw.sample(_TRIGGERS, self._draw.randrange(1, 3)):
            name, version = trigger.split(" ")
            when = f"{at:%Y-%m-%d %H:%M:%S}"
            version = version.strip("()")
            dpkg.append(f"{when} trigproc {name}:amd64 {version} <none>")
            dpkg += [f"{when} status {s} {name}:amd64 {version}" for s in ("half-configured", "installed")]
            term.append(f"Processing triggers for {trigger} ...")
        stamp = at.strftime("%Y-%m-%d  %H:%M:%S")
        history += [f"Upgrade: {', '.join(changes)}", f"End-Date: {stamp}"]
        term.append(f"Log ended: {stamp}")

    def _says(self, name: str) -> list[str]:
        """What the scripts of some packages say."""
        if name.startswith("linux-image"):
            kernel = name.removeprefix("linux-image-") + "-amd64"
            return [
                "/etc/kernel/postinst.d/initramfs-tools:",
                f"update-initramfs: Generating /boot/initrd.img-{kernel}",
                "/etc/kernel/postinst.d/zz-update-grub:",
                "Generating grub configuration file ...",
                f"Found linux image: /boot/vmlinuz-{kernel}",
                f"Found initrd image: /boot/initrd.img-{kernel}",
                "done",
            ]
        said = {
            "ca-certificates": [
                "Updating certificates in /etc/ssl/certs...",
                "0 added, 0 removed; done.",
            ],
            "tzdata": [
                "",
                "Current default time zone: 'Etc/UTC'",
                "Local time is now:      Fri May  8 06:11:02 UTC 2026.",
                "Universal Time is now:  Fri May  8 06:11:02 UTC 2026.",
                "Run 'dpkg-reconfigure tzdata' if you wish to change it.",
                "",
            ],
            "openssh-server": [
                "rescue-ssh.target is a disabled or a static unit not running, not starting it."
            ],
            "mdadm": ["update-initramfs: deferring update (trigger activated)"],
            "postgresql-15": [
                "Building PostgreSQL dictionaries from installed myspell/hunspell packages...",
                "Removing obsolete dictionary files:",
            ],
            "nginx": ["Upgrading binary: nginx."],
            "rsyslog": [
                "Installing new version of config file /etc/rsyslog.conf ...",
                "Created symlink /etc/systemd/system/syslog.service → /lib/systemd/system/rsyslog.service.",
            ],
            "fail2ban": ["Adding 'diversion of /usr/bin/ban to /usr/bin/ban.orig by fail2ban'"],
        }
        return said.get(name, [])

    def _solver(self) -> Iterator[str]:
        yield "Request: EIPP 0.1"
        yield "Architecture: amd64"
        yield "Architectures: amd64"
        yield f"Install: {' '.join(f'{name}:amd64' for name in _STEMS[:5])}"
        yield "Planner: internal"
        for number in range(600):
            name = _STEMS[number] if number < len(_STEMS) else f"libferry{number}"
            yield ""
            yield f"Package: {name}"
            yield f"Architecture: {self._built_for.get(name, 'amd64')}"
            yield f"Version: {self._version(name, 3)}"
            yield f"APT-ID: {self._draw.randrange(70_000)}"
            if number % 7 == 0:
                yield "Essential: yes"
            yield "Status: installed"
            yield f"Depends: libc6 (>= 2.{self._draw.randrange(4, 35)}), libferry{self._draw.randrange(600)}"
            if number % 40 == 0:
                yield self._draw.choice(("Conflicts: sftp", f"Conflicts: raft{number} (<< {number}.1)"))

    def _alternatives(self) -> list[str]:
        """An installation of PostgreSQL with its manual, and of an editor."""
        pages = ("ABORT", "ALTER_TABLE", "BEGIN", "COMMIT", "DEALLOCATE", "ROLLBACK")
        slaves = " ".join(
            f"--slave /usr/share/man/man7/{page}.7.gz {page}.7.gz /usr/share/postgresql/15/man/man7/{page}.7.gz"
            for page in pages
        )
        lines = []
        for name, link, path, more in (
            (
                "psql.1.gz",
                "/usr/share/man/man1/psql.1.gz",
                "/usr/share/postgresql/15/man/man1/psql.1.gz",
                slaves,
            ),
            (
                "ABORT.7.gz",
                "/usr/share/man/man7/ABORT.7.gz",
                "/usr/share/postgresql/15/man/man7/ABORT.7.gz",
                "",
            ),
            ("editor", "/usr/bin/editor", "/usr/bin/vim.basic", ""),
            ("pager", "/usr/bin/pager", "/usr/bin/less", ""),
        ):
            when = f"update-alternatives {self._moment(3, 9):%Y-%m-%d %H:%M:%S}"
            lines.append(f"{when}: run with --install {link} {name} {path} 150 {more}".rstrip())
            lines.append(f"{when}: link group {name} updated to point to {path}")
        return lines

    def _auth(self) -> list[str]:
        events: list[tuple[datetime, str]] = []
        for day in range(self._days):
            for hour in range(24):
                at = self._begins + timedelta(days=day, hours=hour, minutes=17, seconds=1)
                pid = self._draw.randrange(1000, 60_000)
                events.append(
                    (
                        at,
                        f"CRON[{pid}]: pam_unix(cron:session): session opened for user root(uid=0) by (uid=0)",
                    )
                )
                events.append((at, f"CRON[{pid}]: pam_unix(cron:session): session closed for user root"))
            for _ in range(self._draw.randrange(2, 7)):
                events += self._login(self._moment(day, self._draw.randrange(7, 19)))
        events.sort(key=lambda event: event[0])
        return [f"{at:%b} {at.day:2} {at:%H:%M:%S} {HOST} {said}" for at, said in events]

    def _login(self, at: datetime) -> Iterator[tuple[datetime, str]]:
        person, pid, session = (
            self._draw.choice(_PEOPLE),
            self._draw.randrange(1000, 60_000),
            self._draw.randrange(9000),
        )
        address = f"10.0.{self._draw.randrange(9)}.{self._draw.randrange(250)}"
        sshd, after = f"sshd[{pid}]:", timedelta(seconds=self._draw.randrange(60, 3000))
        yield (
            at,
            f"{sshd} Accepted publickey for {person} from {address} port {self._draw.randrange(30_000, 60_000)} ssh2: ED25519 SHA256:{person}0aBcD",
        )
        yield at, f"{sshd} pam_unix(sshd:session): session opened for user {person}(uid=1000) by (uid=0)"
        yield at, f"systemd-logind[612]: New session {session} of user {person}."
        yield (
            at + after / 2,
            f"sudo:    {person} : TTY=pts/0 ; PWD=/home/{person} ; USER=root ; COMMAND=/usr/bin/apt list",
        )
        yield (
            at + after / 2,
            f"sudo: pam_unix(sudo:session): session opened for user root(uid=0) by {person}(uid=1000)",
        )
        yield at + after / 2, "sudo: pam_unix(sudo:session): session closed for user root"
        yield at + after, f"{sshd} Received disconnect from {address} port 40022:11: disconnected by user"
        yield at + after, f"{sshd} pam_unix(sshd:session): session closed for user {person}"
        yield at + after, f"systemd-logind[612]: Session {session} logged out. Waiting for processes to exit."
        yield at + after, f"systemd-logind[612]: Removed session {session}."

    def _journal(self) -> list[str]:
        """As `journalctl -o json` writes it."""
        events: list[tuple[datetime, str, str, int]] = []
        timers = (
            ("apt-daily", "Daily apt download activities"),
            ("logrotate", "Rotate log files"),
            ("man-db", "Daily man-db regeneration"),
            ("fstrim", "Discard unused blocks on filesystems from /etc/fstab"),
        )
        for day in range(self._days):
            for unit, title in timers:
                at = self._moment(day, self._draw.randrange(24))
                name = f"{unit}.service"
                events.append((at, "systemd", f"Starting {name} - {title}...", 6))
                end = at + timedelta(seconds=self._draw.randrange(1, 9))
                events.append((end, "systemd", f"{name}: Deactivated successfully.", 6))
                events.append((end, "systemd", f"Finished {name} - {title}.", 6))
            for hour in range(24):
                at = self._moment(day, hour)
                events.append((at, "CRON", "(root) CMD (   cd / && run-parts --report /etc/cron.hourly)", 6))
                if hour % 6 == 0:
                    number = self._draw.randrange(1, 99)
                    events.append(
                        (at, "dhclient", f"DHCPREQUEST for 10.0.0.{number} on eth0 to 10.0.0.1 port 67", 6)
                    )
                    events.append((at, "dhclient", f"DHCPACK of 10.0.0.{number} from 10.0.0.1", 6))
                    events.append(
                        (at, "systemd-timesyncd", "Contacted time server 10.0.0.1:123 (ntp.example).", 5)
                    )
        events.sort(key=lambda event: event[0])
        return [
            json.dumps({
                "__REALTIME_TIMESTAMP": str(int(at.timestamp() * 1_000_000)),
                "_HOSTNAME": HOST,
                "PRIORITY": str(priority),
                "SYSLOG_IDENTIFIER": program,
                "_PID": "1" if program == "systemd" else str(900 + len(program)),
                "MESSAGE": said,
            })
            for at, program, said, priority in events
        ]  # fmt: skip
