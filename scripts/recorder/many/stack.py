"""The twelve programs of the set: how they are prepared, started, released anew and kept alive."""

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from recorder.prepare import PACKAGES, POSTGRES_CONF
from recorder.software import POSTGRES, Missing, Stack, is_open, wait_until

PROGRAMS = Path(__file__).parent / "programs"
PYTHON = ("catalog", "orders", "payments", "worker", "batch")
NODE = ("web", "search", "notify")
OWN = (*NODE, *PYTHON)
SERVICES = ("gateway", *OWN, "postgres", "cache", "queue")
LISTENS = {"gateway": 28080, "web": 28001, "catalog": 28002, "search": 28003, "orders": 28004,
           "payments": 28005, "notify": 28006, "cache": 26379, "queue": 26380}  # fmt: skip
MEMORY_MIB = 200  # of a Python service, as a unit file would say
HEAP_MIB = 64  # of a Node service

REDIS_CONF = """
bind 127.0.0.1
port {port}
dir {dir}
save {save}
loglevel notice
maxmemory 48mb
maxmemory-policy {policy}
"""

# As in a container: answers and errors in one stream. $request_id is the trace id of everything behind it.
NGINX_CONF = """
daemon off;
worker_processes 1;
pid {work}/run/nginx.pid;
error_log stderr notice;
events {{ worker_connections 256; }}
http {{
    log_format answers escape=json '{{"ts":$msec,"trace_id":"$request_id","method":"$request_method",'
        '"uri":"$request_uri","status":$status,"bytes":$body_bytes_sent,"request_time":$request_time,'
        '"upstream_time":"$upstream_response_time"}}';
    access_log {work}/log/gateway.log answers;
    client_body_temp_path {work}/tmp/body;
    proxy_temp_path {work}/tmp/proxy;
    fastcgi_temp_path {work}/tmp/fastcgi;
    uwsgi_temp_path {work}/tmp/uwsgi;
    scgi_temp_path {work}/tmp/scgi;
    server {{
        listen 127.0.0.1:28080;
        location / {{
            proxy_pass http://127.0.0.1:28001;
            proxy_set_header X-Trace-Id $request_id;
            proxy_connect_timeout 2s;
            proxy_read_timeout 6s;
        }}
    }}
}}
"""

SCHEMA = (
    "CREATE TABLE products (id int PRIMARY KEY, name text, price numeric(8,2), stock int)",
    "INSERT INTO products SELECT i, (ARRAY['Lamp','Desk','Chair','Shelf','Mirror','Carpet','Clock','Vase',"
    "'Stool','Sofa','Bench','Frame'])[i % 12 + 1] || ' ' || (ARRAY['oak','steel','glass','linen','walnut',"
    "'cork','brass'])[i % 7 + 1] || ' ' || i, (i % 500) + 0.99, 60 FROM generate_series(1, 400) i",
    "CREATE TABLE orders (id serial PRIMARY KEY, cart text, total numeric(10,2), state text, "
    "placed timestamptz DEFAULT now())",
    "CREATE TABLE items (order_id int, product_id int, quantity int)",
    "CREATE TABLE ledger (id serial PRIMARY KEY, order_id int, amount numeric(10,2), code text)",
    "CREATE TABLE stock_reports (pieces bigint, value numeric, written timestamptz DEFAULT now())",
    "GRANT ALL ON ALL TABLES IN SCHEMA public TO catalog, orders, payments, batch",
    "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO catalog, orders, payments, batch",
    "VACUUM ANALYZE",
)


@dataclass(slots=True, kw_only=True)
class Services(Stack):
    """`down`: services that are meant not to run now; the others are started again when they end."""

    down: set[str] = field(default_factory=set)
    releases: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OWN, 0))
    broken: dict[str, str] = field(default_factory=dict)  # service -> RELEASE_FAULT
    lock: threading.RLock = field(default_factory=threading.RLock)
    ended: threading.Event = field(default_factory=threading.Event)

    def log_of(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    def fault_file(self, service: str) -> Path:
        return self.work / "faults" / f"{service}.json"

    def start_service(self, service: str) -> None:
        """Starts one and waits until it listens."""
        with self.lock:
            self.down.discard(service)
            if service == "postgres":
                # PostgreSQL needs a moment until the memory of the one before is free.
                self.start_postgres()
                return
            self.spawn(service, *self._command(service), log=f"{service}.log", **self._variables(service))
        if service in LISTENS and service != "gateway":
            with contextlib.suppress(TimeoutError):  # a release may be too broken to listen
                wait_until(f"{service} listens", lambda: is_open(LISTENS[service]), seconds=8)

    def _command(self, service: str) -> list[str | Path]:
        app = self.work / "app"
        if service in PYTHON:
            return [self.programs.python, app / f"{service}.py"]
        if service in NODE:
            return [self.programs.node, f"--max-old-space-size={HEAP_MIB}", app / f"{service}.js"]
        if service == "gateway":
            return [self.programs.nginx, "-e", "stderr", "-c", self.work / "nginx.conf"]
        return [self.programs.redis, self.work / f"{service}.conf"]

    def _variables(self, service: str) -> dict[str, str]:
        if service not in OWN:
            return {}
        found = {"RELEASE": f"2.{self.releases[service]}.0", "FAULT_FILE": str(self.fault_file(service))}
        if service in PYTHON:
            found["MEMORY_MIB"] = str(MEMORY_MIB)
        if service in self.broken:
            found["RELEASE_FAULT"] = self.broken[service]
        return found

    def stop_service(self, service: str, sig: signal.Signals = signal.SIGTERM) -> None:
        with self.lock:
            self.down.add(service)
            self.end(service, sig)

    def release(self, service: str, *, fault: str | None = None, back: bool = False) -> None:
        """A new version, or back to the one before; with `fault` it is built with that mistake."""
        self.releases[service] += -1 if back else 1
        self.broken.pop(service, None)
        if fault is not None:
            self.broken[service] = fault
        if service not in PYTHON:  # Node 20 cannot share a port: there is a gap of a fraction of a second
            self.stop_service(service)
            self.start_service(service)
            return
        offset = self.log_of(service).stat().st_size
        old = self.processes.pop(service, None)
        self.start_service(service)
        with contextlib.suppress(TimeoutError):  # a release may be too broken to get there
            wait_until(f"{service} is ready", lambda: self._is_ready(service, offset), seconds=8)
        if old is not None:
            old.terminate()
            old.wait(15)

    def _is_ready(self, service: str, offset: int) -> bool:
        with self.log_of(service).open("rb") as log:
            log.seek(offset)
            text = log.read()
        return any(word in text for word in (b"listening", b"wait for jobs", b"schedule loaded"))

    def keep_alive(self) -> None:
        """Starts what ended by itself again, a second later, as systemd would; until `ended`."""
        while not self.ended.wait(1.0):
            with self.lock:
                dead = [n for n, p in self.processes.items() if p.poll() is not None and n not in self.down]
                for name in dead:
                    self.processes.pop(name)
            for name in dead:
                self.start_service(name)

    def start(self) -> None:
        for service in ("postgres", "cache", "queue", "catalog", "search", "payments", "notify", "orders",
                        "web", "worker", "batch", "gateway"):  # fmt: skip
            self.start_service(service)
        wait_until("the gateway listens", lambda: is_open(LISTENS["gateway"]))
        threading.Thread(target=self.keep_alive, daemon=True).start()

    def stop(self) -> None:
        """Ends everything that was started; safe to call at any point."""
        self.ended.set()
        with self.lock:
            for name in ("gateway", *OWN, "cache", "queue"):
                self.end(name)
            self.end("postgres", signal.SIGINT)
            for name in list(self.processes):
                self.end(name, signal.SIGKILL)

    def versions(self) -> dict[str, str]:
        nginx = subprocess.run([self.programs.nginx, "-v"], capture_output=True, text=True, check=True)
        return {
            "nginx": nginx.stderr.strip().removeprefix("nginx version: "),
            "PostgreSQL": self.call(self.programs.postgres / "postgres", "--version").strip(),
            "Redis": " ".join(self.call(self.programs.redis, "--version").split()[:3]),
            "Python": self.call(self.programs.python, "--version").strip(),
            "Node": self.call(self.programs.node, "--version").strip(),
            "clients": ", ".join(PACKAGES),
        }


def install_clients(target: Path, python: str) -> None:
    """The client libraries of the Python services; needs a network."""
    install = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", python, "install", "-q"),
            *("--no-compile", "-t", target, *PACKAGES),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    if install.returncode:
        raise Missing(f"pip could not install {' and '.join(PACKAGES)}: {install.stderr.strip()[-200:]}")


def prepare_services(stack: Services, clients: Path) -> None:
    """Programs, client libraries, configurations and a filled database."""
    for name in ("log", "run", "tmp", "cache", "queue", "app", "faults"):
        (stack.work / name).mkdir(parents=True)
    shutil.copytree(clients, stack.work / "lib")
    for source in (*PROGRAMS.glob("*.py"), *PROGRAMS.glob("*.js")):
        shutil.copy(source, stack.work / "app" / source.name)
    (stack.work / "nginx.conf").write_text(NGINX_CONF.format(work=stack.work))
    stack.log_of("gateway").touch()
    for name, save, policy in (("cache", "30 200", "allkeys-lru"), ("queue", "20 10", "noeviction")):
        conf = REDIS_CONF.format(port=LISTENS[name], dir=stack.work / name, save=save, policy=policy)
        (stack.work / f"{name}.conf").write_text(conf)
    if stack.dropped:
        for path in [stack.work, *stack.work.rglob("*")]:
            shutil.chown(path, "nobody", "nogroup")
    data, bins = stack.work / "pgdata", stack.programs.postgres
    stack.call(bins / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale")
    with (data / "postgresql.conf").open("a") as conf_file:
        conf_file.write(POSTGRES_CONF.format(port=POSTGRES, run=stack.work / "run"))
    stack.start_postgres(log="setup.log")
    for name in ("catalog", "orders", "payments", "batch"):
        stack.psql(f"CREATE ROLE {name} LOGIN", database="postgres")
    stack.psql("CREATE DATABASE shop", database="postgres")
    for statement in SCHEMA:
        stack.psql(statement, database="shop")
    stack.end("postgres", signal.SIGINT)


def ordinary_release(stack: Services, chance: random.Random) -> str:
    """A new version of a service that works; every stack sees some."""
    service = chance.choice(OWN)
    stack.release(service)
    return service


def pause(seconds: float, since: float) -> None:
    """Sleeps until `seconds` after `since` (time.monotonic)."""
    time.sleep(max(0.0, since + seconds - time.monotonic()))
