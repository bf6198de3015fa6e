"""Everything that must exist before the software starts: directories, clients, certificates, a filled
database."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from recorder.software import (
    HTTP,
    HTTPS,
    PAYMENTS,
    POSTGRES,
    REDIS,
    SHOP_A,
    SHOP_B,
    Missing,
    Stack,
    is_open,
)

SERVICES = Path(__file__).parent / "services"
PACKAGES = ("pg8000==1.31.2", "redis==6.4.0")  # the clients the recorded services use

# Checkpoints, autovacuum and saves run far oftener than by default, so that all of them occur in the
# normal phase too.
POSTGRES_CONF = """
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = '{run}'
max_connections = 30
superuser_reserved_connections = 0
shared_buffers = '32MB'
log_line_prefix = '%m [%p] %q%u@%d '
log_timezone = 'UTC'
log_connections = on
log_disconnections = on
log_checkpoints = on
log_lock_waits = on
log_temp_files = 0
log_autovacuum_min_duration = 0
log_min_duration_statement = '60ms'
deadlock_timeout = '500ms'
checkpoint_timeout = '30s'
autovacuum_naptime = '10s'
autovacuum_vacuum_scale_factor = 0.01
autovacuum_analyze_scale_factor = 0.01
"""

SCHEMA = (
    "CREATE TABLE products (id int PRIMARY KEY, name text, description text, price numeric(8,2), stock int)",
    "INSERT INTO products SELECT i, 'Product ' || i, repeat(md5(i::text), 8), (i % 500) + 0.99, 100 "
    "FROM generate_series(1, 40000) i",
    "CREATE TABLE orders (id serial PRIMARY KEY, request_key text UNIQUE, product_id int, quantity int, "
    "state text, placed timestamptz DEFAULT now())",
    "CREATE TABLE audit (order_id int, document text, written timestamptz DEFAULT now()) TABLESPACE bulk",
    "ALTER TABLE audit ALTER COLUMN document SET STORAGE PLAIN",
    "GRANT ALL ON ALL TABLES IN SCHEMA public TO shop, worker",
    "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO shop, worker",
    "VACUUM ANALYZE",
)


def prepare(stack: Stack) -> None:
    """Directories, client packages, certificates, an initialised and filled database."""
    busy = [p for p in (HTTP, HTTPS, SHOP_A, SHOP_B, PAYMENTS, POSTGRES, REDIS) if is_open(p)]
    if busy:
        raise Missing(f"loopback port {busy[0]} is already in use; end what listens there")
    for name in ("log", "run", "redis", "www", "tls", "bulk", "app", "tmp"):
        (stack.work / name).mkdir(parents=True, exist_ok=True)
    if stack.dropped:
        mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", stack.work / "bulk"]
        if subprocess.run(mount, check=False, capture_output=True).returncode == 0:
            stack.mounted.append(stack.work / "bulk")
            stack.disk_full = "tmpfs"
    for source in SERVICES.glob("*.py"):
        shutil.copy(source, stack.work / "app" / source.name)
    install = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", stack.programs.python, "install", "-q"),
            *("--no-compile", "-t", stack.work / "lib", *PACKAGES),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    if install.returncode:
        raise Missing(f"pip could not install {' and '.join(PACKAGES)}: {install.stderr.strip()[-200:]}")
    _write_static(stack)
    if stack.dropped:
        for path in [stack.work, *stack.work.rglob("*")]:
            shutil.chown(path, "nobody", "nogroup")
    _make_certificates(stack)
    _make_database(stack)


def _write_static(stack: Stack) -> None:
    www = stack.work / "www" / "static"
    www.mkdir(exist_ok=True)
    for name, size in (
        ("site.css", 9_000),
        ("shop.js", 42_000),
        ("logo.svg", 3_000),
        ("banner.jpg", 90_000),
    ):
        (www / name).write_bytes(b"/* shop */ " * (size // 11))


def _make_certificates(stack: Stack) -> None:
    tls, ssl = stack.work / "tls", stack.programs.openssl
    stack.call(
        *(ssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=Shop CA"),
        *("-keyout", tls / "ca.key", "-out", tls / "ca.pem"),
    )
    for name, host, days in (
        ("site", "shop.example", "30"),
        ("payments", "payments.shop.example", "30"),
        ("expired", "payments.shop.example", "-1"),
    ):
        stack.call(
            *(ssl, "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={host}"),
            *("-keyout", tls / f"{name}.key", "-out", tls / f"{name}.csr"),
        )
        stack.call(
            *(ssl, "x509", "-req", "-in", tls / f"{name}.csr", "-days", days, "-CAcreateserial"),
            *("-CA", tls / "ca.pem", "-CAkey", tls / "ca.key", "-out", tls / f"{name}.pem"),
        )
    stack.present_certificate("payments")


def _make_database(stack: Stack) -> None:
    data, bins = stack.work / "pgdata", stack.programs.postgres
    init = [bins / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale"]
    schema = SCHEMA
    if not stack.mounted:
        # Then the disk-full fault limits the size of every file to that of the audit table, so that one
        # must be the largest: larger than the products (14 MB) and than a segment of the write-ahead log.
        init.append("--wal-segsize=1")
        schema = (*SCHEMA, "INSERT INTO audit SELECT 0, repeat('x', 1000) FROM generate_series(1, 24000)")
    stack.call(*init)
    with (data / "postgresql.conf").open("a") as conf:
        conf.write(POSTGRES_CONF.format(port=POSTGRES, run=stack.work / "run"))
    stack.call("mkdir", stack.work / "bulk" / "pg")
    stack.start_postgres(log="setup.log")
    for database, statement in [
        *(("postgres", s) for s in ("CREATE ROLE shop LOGIN", "CREATE ROLE worker LOGIN")),
        ("postgres", "CREATE ROLE reports LOGIN SUPERUSER"),
        ("postgres", "ALTER ROLE shop SET statement_timeout = '2s'"),
        ("postgres", "CREATE DATABASE shop"),
        ("postgres", f"CREATE TABLESPACE bulk LOCATION '{stack.work / 'bulk' / 'pg'}'"),
        *(("shop", s) for s in schema),
    ]:
        stack.psql(statement, database=database)
    stack.end("postgres", signal.SIGINT)
