"""How each shipper sends to the intake: a line to begin with, and a configuration to copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

KEY: Final = "KEY"  # stands where a key goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """`line` and `text` hold {url}, {host}, {port} and {tls}. `key`: what `text` needs with a key."""

    shipper: str
    line: str
    text: str
    key: str


SNIPPETS: Final[Mapping[str, Snippet]] = {
    "opentelemetry": Snippet(
        shipper="OpenTelemetry",
        line="OTEL_EXPORTER_OTLP_LOGS_ENDPOINT={url}/v1/logs",
        text="""\
# An SDK: environment of the program. Traces and metrics go elsewhere, or nowhere.
OTEL_LOGS_EXPORTER=otlp
OTEL_TRACES_EXPORTER=none
OTEL_METRICS_EXPORTER=none
OTEL_EXPORTER_OTLP_LOGS_PROTOCOL=http/protobuf
OTEL_EXPORTER_OTLP_LOGS_ENDPOINT={url}/v1/logs

# The collector: config.yaml
exporters:
  otlphttp/logweir:
    logs_endpoint: {url}/v1/logs
    sending_queue: {{storage: file_storage}}
    retry_on_failure: {{max_elapsed_time: 0}}
service:
  pipelines:
    logs: {{receivers: [filelog], exporters: [otlphttp/logweir]}}
""",
        key="OTEL_EXPORTER_OTLP_LOGS_HEADERS=authorization=Bearer%20KEY\n"
        "# the collector: headers: {{authorization: Bearer KEY}} below logs_endpoint\n",
    ),
    "fluent-bit": Snippet(
        shipper="Fluent Bit",
        line="fluent-bit -i tail -p path=app.log "
        "-o es -p host={host} -p port={port} -p suppress_type_name=on",
        text="""\
# fluent-bit.yaml
service: {{storage.path: /var/lib/fluent-bit}}
pipeline:
  inputs:
    - {{name: tail, path: /var/log/app.log, tag: app, storage.type: filesystem}}
  outputs:
    - name: es
      match: '*'
      host: {host}
      port: {port}
      tls: {tls}
      index: shop-app
      suppress_type_name: on
      compress: gzip
      retry_limit: no_limits
""",
        key="      http_user: logweir\n      http_passwd: KEY\n",
    ),
    "vector": Snippet(
        shipper="Vector",
        line="endpoints: [{url}/es]   # of a sink of type elasticsearch",
        text="""\
# vector.yaml
sources:
  app: {{type: file, include: [/var/log/app.log]}}
sinks:
  logweir:
    type: elasticsearch
    inputs: [app]
    endpoints: [{url}/es]
    bulk: {{action: create, index: shop-app}}
    compression: gzip
    buffer: {{type: disk, max_size: 1073741824}}
    acknowledgements: {{enabled: true}}
""",
        key="    auth: {{strategy: basic, user: logweir, password: KEY}}\n",
    ),
    "rsyslog": Snippet(
        shipper="rsyslog",
        line='action(type="omelasticsearch" server="{host}" serverport="{port}" bulkmode="on" ...)',
        text="""\
# RELP is safer: add relp://127.0.0.1:2514 to the setting intake, and ask again.
# /etc/rsyslog.d/logweir.conf; package rsyslog-elasticsearch. Without the retry count rsyslog drops lines.
module(load="omelasticsearch")
template(name="logweir" type="list" option.jsonf="on") {{
  property(outname="@timestamp" name="timereported" dateFormat="rfc3339" format="jsonf")
  property(outname="host" name="hostname" format="jsonf")
  property(outname="service" name="programname" format="jsonf")
  property(outname="level" name="syslogseverity-text" format="jsonf")
  property(outname="message" name="$.logweir" format="jsonf")
}}
set $.logweir = ltrim($msg);
action(type="omelasticsearch" server="{host}" serverport="{port}" usehttps="{tls}" bulkmode="on"
       template="logweir" searchIndex="syslog" searchType="" maxbytes="4m"
       action.resumeRetryCount="-1" queue.type="LinkedList" queue.filename="logweir"
       queue.saveOnShutdown="on" queue.maxDiskSpace="1g"
       )
""",
        key='# within action(...): uid="logweir" pwd="KEY"\n',
    ),
    "loki": Snippet(
        shipper="Alloy, Promtail",
        line="url: {url}/loki/api/v1/push   # of a client",
        text="""\
# Promtail
clients:
  - url: {url}/loki/api/v1/push
    backoff_config: {{max_retries: 0}}

# Alloy
loki.write "logweir" {{
  endpoint {{
    url = "{url}/loki/api/v1/push"
    max_backoff_retries = 0
  }}
}}
""",
        key="# Promtail: bearer_token: KEY below url; Alloy: bearer_token = \"KEY\" below url\n",
    ),
    "curl": Snippet(
        shipper="curl",
        line="curl --data-binary @app.log '{url}/api/v1/lines?workload=shop/app'",
        text="""\
# Plain lines. With a key of its own a request may be repeated, and is in once.
curl --fail --retry 10 --retry-connrefused -H "Idempotency-Key: $(uuidgen)" \\
  --data-binary @app.log '{url}/api/v1/lines?workload=shop/app'

# JSON, a document a line
curl --fail -H 'Content-Type: application/x-ndjson' --data-binary @app.ndjson '{url}/api/v1/lines'
""",
        key="# with: -H 'Authorization: Bearer KEY'\n",
    ),
}  # fmt: skip


# rsyslog over RELP waits for the answer to each line, and loses none while it has room for its queue.
RSYSLOG_RELP: Final = Snippet(
    shipper="rsyslog",
    line='action(type="omrelp" target="{host}" port="{port}" action.resumeRetryCount="-1")',
    text="""\
# /etc/rsyslog.d/logweir.conf; package rsyslog-relp. Without the retry count rsyslog drops lines.
module(load="omrelp")
action(type="omrelp" target="{host}" port="{port}" template="RSYSLOG_SyslogProtocol23Format"
       action.resumeRetryCount="-1" queue.type="LinkedList" queue.filename="logweir"
       queue.saveOnShutdown="on" queue.maxDiskSpace="1g")
""",
    key="",
)


def snippet_lines(urls: Sequence[str]) -> list[tuple[str, str]]:
    """The shippers, each with the line to begin with. Empty where no listener speaks HTTP."""
    if of_scheme(urls, "http") is None:
        return []
    chosen = (_chosen(name, urls) for name in SNIPPETS)
    return [(one.shipper, one.line.format(**_places(url))) for one, url in chosen]


def snippet_text(name: str, urls: Sequence[str], *, keyed: bool) -> str:
    """The configuration of one shipper. `keyed`: requests over HTTP need a key."""
    one, url = _chosen(name, urls)
    return (one.text + (one.key if keyed else "")).format(**_places(url))


def of_scheme(urls: Sequence[str], begin: str) -> str | None:
    """The first listener whose scheme begins so."""
    return next((url for url in urls if url.startswith(begin)), None)


def _chosen(name: str, urls: Sequence[str]) -> tuple[Snippet, str]:
    if name == "rsyslog" and (relp := of_scheme(urls, "relp:")):
        return RSYSLOG_RELP, relp
    return SNIPPETS[name], of_scheme(urls, "http") or ""


def _places(url: str) -> dict[str, object]:
    parts = urlsplit(url)
    return {
        "url": url,
        "host": parts.hostname,
        "port": parts.port,
        "tls": "on" if parts.scheme == "https" else "off",
    }
