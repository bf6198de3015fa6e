"""Addresses of sentinels: what is read, what is refused, and what no text shows."""

import ssl

import pytest
import redis
from kombu import Connection

from pipeline.errors import BadInput, BadSetting
from pipeline.messages.app import broker_url, make_app
from pipeline.redis.check import check_redis
from pipeline.redis.connection import open_pool
from pipeline.settings import Settings
from pipeline.settings.values import SentinelAddress, masked_url

LOGIN = "sentinel://us:p%40ss@h1:26380,h2,[::1]:3/2?master=main&sentinel_password=q%40w&sentinel_username=su"


def test_an_address_names_sentinels_master_database_and_both_logins() -> None:
    assert SentinelAddress.parse(LOGIN) == SentinelAddress(
        sentinels=(("h1", 26380), ("h2", 26379), ("::1", 3)),
        master="main",
        database=2,
        username="us",
        password="p@ss",
        sentinel_username="su",
        sentinel_password="q@w",
    )
    plain = SentinelAddress.parse("sentinel://h1?master=main")
    assert plain == SentinelAddress(sentinels=(("h1", 26379),), master="main")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sentinel://h1:26379", "names no master"),
        ("sentinel://h1:26379/0?master=", "names no master"),
        ("sentinel://:secret@h1:99999/0?master=m", "not HOST or HOST:PORT"),
        ("sentinel://:secret@h1:x/0?master=m", "not HOST or HOST:PORT"),
        ("sentinel://:secret@h1,,h2/0?master=m", "not HOST or HOST:PORT"),
        ("sentinel://:secret@/0?master=m", "not HOST or HOST:PORT"),
        ("sentinel://:secret@h1/one?master=m", "not a number"),
        ("sentinel://h1/0?master=m&sentinel_pasword=secret", "unknown option 'sentinel_pasword'"),
        ("sentinel://h1/0?master=m&ssl_ca_certs=secret", "only sentinels:// has; write sentinels://"),
        ("sentinels://h1/0?master=m&ssl_ca_cert=secret", "unknown option 'ssl_ca_cert'"),
        ("sentinels://h1/0?master=m&ssl_cert_reqs=secret", "must be required, optional or none"),
        ("sentinels://h1", "names no master"),
    ],
)
def test_a_wrong_address_is_refused_in_one_sentence_without_its_password(url: str, said: str) -> None:
    with pytest.raises(BadSetting, match=said) as refused:
        Settings(redis_url=url)
    assert "secret" not in str(refused.value)


TLS = "sentinels://us:p%40ss@h1,h2/2?master=main&ssl_ca_certs=/ca.crt&ssl_password=q%40w"


def test_servers_and_sentinels_get_the_same_options_of_tls() -> None:
    expected = {
        "ssl_ca_certs": "/ca.crt",
        "ssl_password": "q@w",
        "ssl_cert_reqs": ssl.CERT_REQUIRED,
        "ssl_check_hostname": True,
    }
    conf = make_app(Settings(redis_url=TLS)).conf
    assert conf.broker_use_ssl == expected
    sentinels = conf.broker_transport_options["sentinel_kwargs"]
    assert sentinels["ssl"] and expected.items() <= sentinels.items()
    assert broker_url(TLS) == "sentinel://us:p%40ss@h1:26379/2;sentinel://us:p%40ss@h2:26379/2"
    servers = open_pool(TLS, timeout_s=1, connect_s=1)
    assert issubclass(servers.connection_class, redis.SSLConnection)
    assert expected.items() <= servers.connection_kwargs.items()
    unchecked = make_app(Settings(redis_url="sentinels://h1/0?master=m&ssl_cert_reqs=none")).conf
    assert unchecked.broker_use_ssl == {"ssl_cert_reqs": ssl.CERT_NONE, "ssl_check_hostname": False}


def test_without_tls_nobody_gets_options_of_tls() -> None:
    conf = make_app(Settings(redis_url=LOGIN)).conf
    assert conf.broker_use_ssl is None
    assert not any(name.startswith("ssl") for name in conf.broker_transport_options["sentinel_kwargs"])


def test_no_text_shows_the_password_of_redis_or_of_a_sentinel() -> None:
    settings = Settings(redis_url=LOGIN)
    broker = make_app(settings).connection()
    for text in (
        masked_url(LOGIN),
        masked_url("sentinel://h1:26379/0?master=m&sentinel_password=q@w"),
        repr(settings),
        repr(SentinelAddress.parse(LOGIN)),
        masked_url(TLS),
        repr(SentinelAddress.parse(TLS)),
        repr(Settings(redis_url=TLS)),
        broker.as_uri(),
        repr(broker),
    ):
        assert not any(secret in text for secret in ("p%40ss", "p@ss", "q%40w", "q@w", "@w"))


def test_kombu_gets_one_url_for_each_sentinel_with_the_login_of_redis() -> None:
    assert broker_url(LOGIN).split(";") == [
        "sentinel://us:p%40ss@h1:26380/2",
        "sentinel://us:p%40ss@h2:26379/2",
        "sentinel://us:p%40ss@[::1]:3/2",
    ]
    options = make_app(Settings(redis_url=LOGIN)).conf.broker_transport_options
    assert options["master_name"] == "main"
    assert options["sentinel_kwargs"]["password"] == "q@w"
    assert Connection(broker_url("sentinel://h1/0?master=m")).password is None


def test_sentinels_that_do_not_answer_are_named_and_no_password_is() -> None:
    url = "sentinel://:secret@127.0.0.1:1,127.0.0.1:2/0?master=main&sentinel_password=secret"
    with pytest.raises(BadInput) as refused:
        check_redis(Settings(redis_url=url))
    text = str(refused.value)
    assert "no sentinel names a master 'main': 127.0.0.1:1 does not answer, 127.0.0.1:2 does not" in text
    assert "secret" not in text
