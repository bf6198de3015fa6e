"""A broker of Kafka in a process of its own: the mock cluster inside librdkafka.

It speaks the protocol on TCP, holds in memory what is produced, and serves real fetches. It is no Apache
Kafka: it has no disk, no TLS, no logins, and no index of times. Each line of standard input calls one of its
functions.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import confluent_kafka


def library() -> Any:
    """The librdkafka that confluent-kafka brought along."""
    place = Path(confluent_kafka.__file__).parent.parent
    (found,) = place.glob("confluent_kafka.libs/librdkafka-*")
    return ctypes.CDLL(str(found))


def main() -> None:
    lib = library()
    lib.rd_kafka_conf_new.restype = ctypes.c_void_p
    lib.rd_kafka_new.restype = ctypes.c_void_p
    lib.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    lib.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    fault = ctypes.create_string_buffer(512)
    conf = ctypes.c_void_p(lib.rd_kafka_conf_new())
    lib.rd_kafka_conf_set(conf, b"log_level", b"3", fault, 512)
    handle = ctypes.c_void_p(lib.rd_kafka_new(0, conf, fault, 512))
    cluster = ctypes.c_void_p(lib.rd_kafka_mock_cluster_new(handle, 1))
    lib.rd_kafka_mock_set_controller_id(cluster, 1)  # only a controller tells ids of topics
    lib.rd_kafka_mock_broker_set_host_port.restype = None
    print(lib.rd_kafka_mock_cluster_bootstraps(cluster).decode(), flush=True)
    kinds = {"partition_delete_records": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int64)}
    for line in sys.stdin:
        name, *values = json.loads(line)
        usual = [ctypes.c_char_p if isinstance(value, str) else ctypes.c_int for value in values]
        arguments = [
            kind(value.encode() if isinstance(value, str) else value)
            for kind, value in zip(kinds.get(name, usual), values, strict=True)
        ]
        answer = getattr(lib, f"rd_kafka_mock_{name}")(cluster, *arguments)
        print(answer or 0, flush=True)


if __name__ == "__main__":
    main()
