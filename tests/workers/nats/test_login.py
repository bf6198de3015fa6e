"""Logins to a real nats-server: TLS with a certificate of ours, a password, a token, a credentials file."""

from contextlib import closing
from pathlib import Path

import pytest
from nats_server import NatsServer
from polling import wait_until
from tls_redis import Certificates

from pipeline.errors import SourceUnavailable
from pipeline.nats import connection as connection_module
from pipeline.nats.connection import NatsConnection
from pipeline.nats.streams import described, ensure_in
from pipeline.settings.nats import NatsSource


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library tries again until this time is over."""
    monkeypatch.setattr(connection_module, "CONNECT_S", 1.0)


def reached(address: str) -> int:
    """The first sequence of the stream that this address made."""
    source = NatsSource.parse(address)
    with closing(NatsConnection(source)) as connection:
        return ensure_in(connection, source).first


def refusal(address: str) -> str:
    """Why this address is not reached."""
    with pytest.raises(SourceUnavailable) as caught:
        reached(address)
    return str(caught.value)


def test_a_server_with_tls_is_shown_our_certificate(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path)
    files = f'cert_file: "{made.server}", key_file: "{tmp_path}/server.key", ca_file: "{made.ca}"'
    with NatsServer.running(f"tls {{ {files}, verify: true }}") as server:
        ours = f"ca={made.ca}&cert={made.client}&key={tmp_path}/client.key"
        assert reached(f"tls://{server.servers}/raw_logs?{ours}") == 1
        with pytest.raises(SourceUnavailable, match="does not answer"):
            reached(f"tls://{server.servers}/raw_logs?ca={made.ca}")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match=r"the file \S+/no\.pem of nats_source is not there"):
        reached(f"tls://127.0.0.1:9/raw_logs?ca={tmp_path}/no.pem")


def test_a_password_and_a_token_are_sent() -> None:
    with NatsServer.running('authorization { user: me, password: "p@ss" }') as server:
        assert reached(f"nats://me:p%40ss@{server.servers}/raw_logs") == 1
        # The library meets the closed connection before the reason at times, so it is tried as a reader does.
        wrong = f"nats://me:wrong@{server.servers}/raw_logs"
        assert wait_until(lambda: "uthorization" in refusal(wrong), timeout_s=20)
    with NatsServer.running('authorization { token: "s3cret" }') as server:
        assert reached(f"nats://s3cret@{server.servers}/raw_logs") == 1


def test_a_credentials_file_signs_the_nonce_of_the_server(tmp_path: Path) -> None:
    import base64
    import json
    import os
    import time

    import nkeys

    def pair(prefix: int) -> nkeys.KeyPair:
        return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), prefix))

    def token(claims: dict[str, object], signer: nkeys.KeyPair) -> str:
        def part(value: bytes) -> str:
            return base64.urlsafe_b64encode(value).decode().rstrip("=")

        head = part(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
        issuer = signer.public_key.decode()
        body = part(json.dumps({"jti": "t", "iat": int(time.time()), "iss": issuer, **claims}).encode())
        return f"{head}.{body}.{part(signer.sign(f'{head}.{body}'.encode()))}"

    operator, account, system, user = (pair(p) for p in (14 << 3, 0, 0, 20 << 3))
    account_name = account.public_key.decode()
    of_operator = token(
        {"sub": operator.public_key.decode(), "nats": {"type": "operator", "version": 2}}, operator
    )
    limits = {"subs": -1, "data": -1, "payload": -1, "conn": -1, "leaf": -1, "mem_storage": -1,
              "disk_storage": -1, "streams": -1, "consumer": -1, "imports": -1, "exports": -1,
              "wildcards": True}  # fmt: skip
    of_account = token(
        {"sub": account_name, "nats": {"type": "account", "version": 2, "limits": limits}}, operator
    )
    system_name = system.public_key.decode()
    of_system = token({"sub": system_name, "nats": {"type": "account", "version": 2}}, operator)
    of_user = token(
        {
            "sub": user.public_key.decode(),
            "nats": {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1},
        },
        account,
    )
    creds = tmp_path / "app.creds"
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{of_user}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    config = (
        f"operator: {of_operator}\nresolver: MEMORY\nresolver_preload: {{ "
        f"{account_name}: {of_account}, {system_name}: {of_system} }}\nsystem_account: {system_name}\n"
    )
    with NatsServer.running(config) as server:
        assert reached(f"nats://{server.servers}/raw_logs?creds={creds}") == 1
        with pytest.raises(SourceUnavailable, match="does not answer"):
            reached(f"nats://{server.servers}/raw_logs")


def test_doctor_says_what_is_there_and_that_core_nats_is_at_most_once() -> None:
    with NatsServer.running() as server:
        assert "the stream logweir-in will be made" in described(NatsSource.parse(server.url()))
        reached(server.url())
        assert "ends at 0" in described(NatsSource.parse(server.url()))
        assert "at most once" in described(NatsSource.parse(server.url(mode="core")))
    with (
        NatsServer.running(jetstream=False) as server,
        pytest.raises(SourceUnavailable, match="no JetStream"),
    ):
        reached(server.url())
