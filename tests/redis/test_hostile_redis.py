"""A Redis with a password, a user of few rights and TLS: one REDIS_URL does for everything, and what is wrong
is told."""

import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from kombu import Connection
from own_redis import server
from tls_redis import Certificates, tls_door

from pipeline.errors import BadInput, BadSetting
from pipeline.messages.app import broker_tls, broker_url, make_app
from pipeline.redis.check import check_redis
from pipeline.settings import Settings
from pipeline.settings.values import masked_url

ROOT = Path(__file__).resolve().parents[2]
# Characters that mean something in URLs, shells, Redis' protocol and regular expressions.
PASSWORD = "s3cret%/?#@:&'\"\\ *wörd"


def documented_line() -> list[str]:
    """The user's rights as docs/operations.md has them."""
    found = re.search(
        r"^user logweir (.*)$", (ROOT / "docs" / "operations.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found is not None
    return found.group(1).split()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[redis.Redis]":
    """A server of this module alone: users cannot be kept to a prefix."""
    with server(tmp_path_factory.mktemp("redis")) as client:
        yield client


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


def socket_of(client: "redis.Redis") -> str:
    return str(client.connection_pool.connection_kwargs["path"])


def allow(client: "redis.Redis", rights: list[str], password: str = PASSWORD) -> None:
    """Make the user `logweir` anew with these rights."""
    client.execute_command(
        "ACL", "SETUSER", "logweir", "reset", *(r.replace(">PASSWORD", f">{password}") for r in rights)
    )


def as_user(client: "redis.Redis") -> Settings:
    login = f"logweir:{quote(PASSWORD, safe='')}"
    return Settings(redis_url=f"unix://{login}@{socket_of(client)}?db=0")


def test_the_user_of_the_manual_may_do_all_that_is_asked_of_it(own: "redis.Redis") -> None:
    allow(own, documented_line())
    check_redis(as_user(own))


@pytest.mark.parametrize(
    "missing",
    ["~{logweir*", "~logweir*", "&*", "+@read", "+@write", "+@transaction", "+@pubsub", "+@scripting", "+@connection", "+info", "+time"],
)  # fmt: skip
def test_a_user_that_lacks_one_right_is_told_so_in_one_sentence(own: "redis.Redis", missing: str) -> None:
    rights = documented_line()
    assert missing in rights
    allow(own, [right for right in rights if right != missing])
    with pytest.raises(BadInput) as told:
        check_redis(as_user(own))
    text = str(told.value)
    assert "docs/operations.md" in text and "rights" in text and "\n" not in text
    assert "s3cret" not in text


def test_a_wrong_password_of_a_user_is_told_without_it(own: "redis.Redis") -> None:
    allow(own, documented_line(), password="another")
    with pytest.raises(BadInput, match="refuses the login") as told:
        check_redis(as_user(own))
    assert "s3cret" not in str(told.value)


# ---- TLS ---------------------------------------------------------------------------------------------


def url_of(port: int, options: str, *, host: str = "localhost", login: str = "") -> str:
    return f"rediss://{login}{host}:{port}/0{options}"


def test_one_url_does_for_redis_py_kombu_scripts_and_flower(own: "redis.Redis", made: Certificates) -> None:
    allow(own, documented_line())
    login = f"logweir:{quote(PASSWORD, safe='')}@"
    with tls_door(socket_of(own), made, ask=True) as port:
        client, key = made.client, made.client.with_suffix(".key")
        url = url_of(port, f"?ssl_ca_certs={made.ca}&ssl_certfile={client}&ssl_keyfile={key}", login=login)
        settings = Settings(redis_url=url)
        check_redis(settings)  # with a script
        app = make_app(settings)
        with app.connection_for_write() as connection:
            connection.SimpleQueue("logweir-tls").put("x")
        assert own.llen("logweir:logweir-tls") == 1
        from flower.utils.broker import Broker  # type: ignore[import-untyped] # it publishes no types

        broker = Broker(
            app.connection_for_read().as_uri(include_password=True),
            broker_options=app.conf.broker_transport_options,
            broker_use_ssl=app.conf.broker_use_ssl,
        )
        import asyncio

        assert asyncio.run(broker.queues(["logweir-tls"]))[0]["messages"] == 1
        own.delete("logweir:logweir-tls", "logweir:_kombu.binding.logweir-tls")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "?ssl_ca_certs=FILE"),
        ("?ssl_ca_certs={other}", "?ssl_ca_certs=FILE"),
        ("?ssl_ca_certs=/nowhere/ca.crt", "correct its ssl_ options"),
    ],
)
def test_a_certificate_that_cannot_be_trusted_is_told_with_the_remedy(
    own: "redis.Redis", made: Certificates, tmp_path: Path, options: str, says: str
) -> None:
    other = Certificates.make(tmp_path) if "other" in options else made
    with tls_door(socket_of(own), made) as port, pytest.raises(BadInput) as told:
        check_redis(Settings(redis_url=url_of(port, options.format(other=other.ca))))
    assert says in str(told.value) and "\n" not in str(told.value)


def test_a_certificate_of_another_name_is_refused(own: "redis.Redis", made: Certificates) -> None:
    with (
        tls_door(socket_of(own), made) as port,
        pytest.raises(BadInput, match="no certificate that can be trusted"),
    ):
        # Another name of this machine, which the certificate does not have.
        check_redis(Settings(redis_url=url_of(port, f"?ssl_ca_certs={made.ca}", host="127.0.0.2")))


def test_a_server_that_wants_a_certificate_of_ours_is_told(own: "redis.Redis", made: Certificates) -> None:
    with tls_door(socket_of(own), made, ask=True) as port, pytest.raises(BadInput) as told:
        check_redis(Settings(redis_url=url_of(port, f"?ssl_ca_certs={made.ca}")))
    assert "\n" not in str(told.value) and "REDIS_URL" in str(told.value)


def test_whoever_mixes_up_the_schemes_is_told_which_one_to_write(
    own: "redis.Redis", made: Certificates
) -> None:
    with tls_door(socket_of(own), made) as port:
        with pytest.raises(BadInput, match="rediss://"):
            check_redis(Settings(redis_url=f"redis://localhost:{port}/0"))
        check_redis(Settings(redis_url=url_of(port, "?ssl_cert_reqs=none")))
        with Connection(
            broker_url(url_of(port, "?ssl_cert_reqs=none")),
            ssl=broker_tls(url_of(port, "?ssl_cert_reqs=none")),
        ) as connection:
            connection.ensure_connection(max_retries=1)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h?ssl_ca_certs=/a", "rediss://"),
        ("rediss://h?ssl_ca_cert=/a", "ssl_ca_cert'"),
        ("rediss://h?ssl_cert_reqs=CERT_NONE", "required, optional or none"),
    ],
)
def test_options_that_would_be_ignored_or_misread_are_refused(url: str, says: str) -> None:
    with pytest.raises(BadSetting, match=re.escape(says)):
        Settings(redis_url=url)


def test_verification_is_on_unless_the_url_says_otherwise() -> None:
    assert broker_tls("redis://h") is None
    assert broker_tls("rediss://h") == {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}
    assert broker_tls("rediss://h?ssl_cert_reqs=none") == {
        "ssl_cert_reqs": ssl.CERT_NONE,
        "ssl_check_hostname": False,
    }
    assert broker_url("rediss://u:p%40w@h:1?db=3&ssl_ca_certs=/a") == "rediss://u:p%40w@h:1/3?db=3"
    assert masked_url("rediss://h?ssl_password=secret&db=1") == "rediss://h?ssl_password=***&db=1"
