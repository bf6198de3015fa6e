"""Starts, reloads and stops the real programs whose logs are recorded, all on loopback under one directory.

Every process runs with TZ=UTC, as `nobody` when the recorder itself runs as root, and in a session of its
own, so that `Stack.stop` can end whatever a fault left behind.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Not the usual numbers, so that a server which already runs here is not in the way.
HTTP, HTTPS, SHOP_A, SHOP_B, PAYMENTS, POSTGRES, REDIS = 28080, 28443, 28001, 28002, 29443, 25432, 26379

LOGS = (
    "nginx-access.log",
    "nginx-error.log",
    "postgres.log",
    "redis.log",
    "shop.log",
    "payments.log",
    "worker.log",
)


class Missing(Exception):
    """Something the recording needs is absent; the text says what and how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Paths of what is started."""

    nginx: str
    postgres: Path  # the directory with initdb, postgres, psql
    redis: str
    openssl: str
    python: str
    node: str = ""


def find_programs(names: Sequence[str] = ("nginx", "redis-server", "openssl")) -> Programs:
    """PostgreSQL and the programs called `names`. Raises Missing with the sentence that names the remedy."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
    found = {name: shutil.which(name, path=path) for name in names}
    absent = [name for name, where in found.items() if where is None]
    homes = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name))
    if on_path := shutil.which("initdb"):
        homes.append(Path(on_path).resolve().parent)
    homes = [home for home in homes if all((home / n).exists() for n in ("initdb", "postgres", "psql"))]
    if not homes:
        absent.append("postgresql")
    if absent:
        raise Missing(f"not installed: {', '.join(absent)}; on Debian: apt-get install {' '.join(absent)}")
    # A system interpreter first: the tracebacks that are recorded show its paths.
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    return Programs(
        nginx=found.get("nginx") or "",
        postgres=homes[-1],
        redis=found.get("redis-server") or "",
        openssl=found.get("openssl") or "",
        python=python,
        node=found.get("node") or "",
    )


def wait_until(what: str, ready: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Polls; raises TimeoutError naming what did not happen."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.05)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass(slots=True, kw_only=True)
class Stack:
    """The running software. `processes` holds what is alive now, by name."""

    work: Path
    programs: Programs
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    mounted: list[Path] = field(default_factory=list)
    disk_full: str = "RLIMIT_FSIZE"  # or "tmpfs"; how that fault is made
    shop_port: int = SHOP_A
    dropped: bool = field(default_factory=lambda: os.geteuid() == 0)  # children give up root

    @property
    def logs(self) -> Path:
        return self.work / "log"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/bin:/bin",
            "TZ": "UTC",
            "LC_ALL": "C.UTF-8",
            "HOME": str(self.work),
            "PYTHONPATH": str(self.work / "lib"),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _identity(self) -> dict[str, object]:
        return {"user": "nobody", "group": "nogroup", "extra_groups": []} if self.dropped else {}

    def call(self, *command: str | Path, **more: str) -> str:
        """Runs to the end as the stack's user and returns stdout; raises CalledProcessError."""
        done = subprocess.run(
            [str(part) for part in command],
            env=self.environment | more,
            cwd=self.work,
            check=True,
            capture_output=True,
            text=True,
            **self._identity(),  # type: ignore[call-overload]
        )
        return str(done.stdout)

    def spawn(self, name: str, *command: str | Path, log: str, **more: str) -> None:
        """Starts a process whose output goes to `log`; `more`: its own environment variables."""
        with (self.logs / log).open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [str(part) for part in command],
                env=self.environment | more,
                cwd=self.work,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                **self._identity(),  # type: ignore[call-overload]
            )

    def end(self, name: str, sig: signal.Signals = signal.SIGTERM, *, seconds: float = 15.0) -> None:
        """Signals one process and waits; kills its whole session when it does not end."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(sig)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)

    def psql(self, sql: str, *, user: str = "postgres", database: str = "shop", program: str = "psql") -> str:
        return self.call(
            self.programs.postgres / "psql",
            *("-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-h", str(self.work / "run")),
            *("-p", str(POSTGRES), "-U", user, "-d", database, "-c", sql),
            PGAPPNAME=program,
        )

    def present_certificate(self, name: str) -> None:
        """Puts one of the certificates where the payment service reads its own."""
        tls = self.work / "tls"
        for kind in ("pem", "key"):
            self.call("cp", tls / f"{name}.{kind}", tls / f"current.{kind}")

    def start_postgres(self, log: str = "postgres.log") -> None:
        self.spawn("postgres", self.programs.postgres / "postgres", "-D", self.work / "pgdata", log=log)
        wait_until("PostgreSQL answers", self._answers)

    def _answers(self) -> bool:
        check = self.programs.postgres / "pg_isready"
        ready = subprocess.run([check, "-q", "-h", "127.0.0.1", "-p", str(POSTGRES)], check=False)
        return ready.returncode == 0

    def start_redis(self) -> None:
        conf = self.work / "redis.conf"
        conf.write_text(REDIS_CONF.format(port=REDIS, dir=self.work / "redis"))
        self.spawn("redis", self.programs.redis, conf, log="redis.log")
        wait_until("Redis answers", lambda: is_open(REDIS))

    def start_shop(self, port: int) -> None:
        self.spawn(
            *(f"shop-{port}", self.programs.python, self.work / "app" / "shop.py", "--port", str(port)),
            *("--postgres-port", str(POSTGRES), "--redis-port", str(REDIS)),
            log="shop.log",
        )
        wait_until("the shop answers", lambda: is_open(port))

    def start_payments(self) -> None:
        tls = self.work / "tls"
        self.spawn(
            *("payments", self.programs.python, self.work / "app" / "payments.py", "--port", str(PAYMENTS)),
            *("--certificate", tls / "current.pem", "--key", tls / "current.key"),
            log="payments.log",
        )
        # A look at its port would be a failed handshake in its log.
        log = self.logs / "payments.log"
        wait_until("the payment service listens", lambda: b'msg="listening"' in log.read_bytes())

    def start_worker(self) -> None:
        self.spawn(
            *("worker", self.programs.python, self.work / "app" / "worker.py"),
            *("--postgres-port", str(POSTGRES), "--redis-port", str(REDIS)),
            log="worker.log",
        )

    def _write_upstream(self) -> None:
        (self.work / "upstream.conf").write_text(f"upstream shop {{ server 127.0.0.1:{self.shop_port}; }}\n")

    def start_nginx(self) -> None:
        self._write_upstream()
        conf = self.work / "nginx.conf"
        conf.write_text(NGINX_CONF % {"work": self.work, "http": HTTP, "https": HTTPS, "payments": PAYMENTS})
        error_log = self.logs / "nginx-error.log"
        self.spawn("nginx", self.programs.nginx, "-e", error_log, "-c", conf, log="nginx-stderr.log")
        wait_until("nginx answers", lambda: is_open(HTTPS))

    def start(self) -> None:
        self.start_postgres()
        self.start_redis()
        self.start_payments()
        self.start_shop(self.shop_port)
        self.start_worker()
        self.start_nginx()

    def deploy(self) -> None:
        """An ordinary release: a new shop process, nginx moved over to it, the old one drained."""
        old = self.shop_port
        self.shop_port = SHOP_B if old == SHOP_A else SHOP_A
        self.start_shop(self.shop_port)
        self._write_upstream()
        self.processes["nginx"].send_signal(signal.SIGHUP)
        time.sleep(2.0)  # nginx has no answer that says "moved over"; open requests are far shorter
        self.end(f"shop-{old}")

    def stop(self) -> None:
        """Ends everything that was started and takes the mounts away; safe to call at any point."""
        for name in ("nginx", "worker", *(n for n in self.processes if n.startswith("shop")), "payments"):
            self.end(name)
        self.end("redis")
        self.end("postgres", signal.SIGINT)
        for name in list(self.processes):
            self.end(name, signal.SIGKILL)
        for where in self.mounted:
            subprocess.run(["umount", where], check=False)
        self.mounted.clear()

    def versions(self) -> dict[str, str]:
        nginx = subprocess.run([self.programs.nginx, "-v"], capture_output=True, text=True, check=True)
        return {
            "nginx": nginx.stderr.strip().removeprefix("nginx version: "),
            "PostgreSQL": self.call(self.programs.postgres / "postgres", "--version").strip(),
            "Redis": " ".join(self.call(self.programs.redis, "--version").split()[:3]),
            "Python": self.call(self.programs.python, "--version").strip(),
            "OpenSSL": self.call(self.programs.openssl, "version").split("(")[0].strip(),
        }


REDIS_CONF = """
bind 127.0.0.1
port {port}
dir {dir}
save 15 20
loglevel notice
maxmemory 64mb
maxmemory-policy allkeys-lru
"""

NGINX_CONF = """
daemon off;
worker_processes 2;
pid %(work)s/run/nginx.pid;
error_log %(work)s/log/nginx-error.log notice;
events { worker_connections 512; }
http {
    access_log %(work)s/log/nginx-access.log combined;
    client_body_temp_path %(work)s/tmp/body;
    proxy_temp_path %(work)s/tmp/proxy;
    fastcgi_temp_path %(work)s/tmp/fastcgi;
    uwsgi_temp_path %(work)s/tmp/uwsgi;
    scgi_temp_path %(work)s/tmp/scgi;
    types { text/css css; application/javascript js; image/svg+xml svg; image/jpeg jpg; }
    client_max_body_size 64k;
    proxy_read_timeout 10s;
    include %(work)s/upstream.conf;
    server {
        listen 127.0.0.1:%(http)d;
        server_name shop.example;
        location /healthz { proxy_pass http://shop; }
        location / { return 301 https://shop.example$request_uri; }
    }
    server {
        listen 127.0.0.1:%(https)d ssl;
        server_name shop.example;
        ssl_certificate %(work)s/tls/site.pem;
        ssl_certificate_key %(work)s/tls/site.key;
        root %(work)s/www;
        location /static/ { expires 1h; }
        location /payments/ {
            proxy_pass https://127.0.0.1:%(payments)d;
            proxy_ssl_verify on;
            proxy_ssl_trusted_certificate %(work)s/tls/ca.pem;
            proxy_ssl_name payments.shop.example;
            proxy_ssl_session_reuse off;
        }
        location / {
            proxy_pass http://shop;
            proxy_set_header Host $host;
        }
    }
}
"""
