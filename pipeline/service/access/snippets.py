"""How each shipper sends to the intake: a line to begin with, and a configuration to copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from pipeline.redis.attach import running
from pipeline.settings import Settings
from pipeline.settings.listeners import Listener

KEY: Final = "KEY"  # stands where a key goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """`line` and `text` hold {url}, {host}, {port} and {tls}. `key`: what `text` needs with a key. `line`: ""
    for one that is only shown by its name. `protocol`: as `logweir senders` names it. `tested`: our tests
    send with it, or with its library."""

    shipper: str
    line: str = ""
    text: str
    key: str
    protocol: str
    tested: bool = False


SNIPPETS: Final[Mapping[str, Snippet]] = {
    "opentelemetry": Snippet(
        shipper="OpenTelemetry",
        protocol="otlp",
        tested=True,
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
        protocol="bulk",
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
        protocol="bulk",
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
        protocol="bulk",
        tested=True,
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
        protocol="loki",
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
        protocol="lines",
        tested=True,
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
    "filebeat": Snippet(
        shipper="Filebeat",
        protocol="bulk",
        text="""\
# filebeat.yml
filebeat.inputs:
  - {{type: filestream, id: app, paths: [/var/log/app.log]}}
setup.ilm.enabled: false
setup.template.enabled: false
output.elasticsearch:
  hosts: ['{url}/es']
  index: shop-app
  allow_older_versions: true
""",
        key="  username: logweir\n  password: KEY\n",
    ),
    "logstash": Snippet(
        shipper="Logstash",
        protocol="bulk",
        text="""\
# A pipeline of Logstash; it asks again for as long as it takes.
input {{ file {{ path => "/var/log/app.log" }} }}
output {{
  elasticsearch {{
    hosts => ["{url}/es"]
    index => "shop-app"
    manage_template => false
    ilm_enabled => false
    data_stream => false
  }}
}}
""",
        key='# within elasticsearch: user => "logweir" and password => "KEY"\n',
    ),
    "syslog-ng": Snippet(
        shipper="syslog-ng",
        protocol="lines",
        text="""\
# /etc/syslog-ng/conf.d/logweir.conf
destination d_logweir {{
  http(
    url("{url}/api/v1/lines?workload=syslog")
    method("POST")
    body("$ISODATE $HOST $PROGRAM[$PID]: $MESSAGE")
    delimiter("\\n") batch-lines(500) batch-timeout(1000) retries(1000000)
    disk-buffer(disk-buf-size(1G) reliable(yes))
  );
}};
log {{ source(s_src); destination(d_logweir); }};
""",
        key='# within http(...): headers("Authorization: Bearer KEY")\n',
    ),
    "docker": Snippet(
        shipper="Docker",
        protocol="hec",
        text="""\
# One container; for all of them, the same as log-driver and log-opts in /etc/docker/daemon.json.
docker run --log-driver=splunk --log-opt splunk-url={url} \\
  --log-opt splunk-verify-connection=false --log-opt splunk-format=raw \\
  --log-opt splunk-token=none IMAGE
""",
        key="# with splunk-token=KEY\n",
    ),
    "python": Snippet(
        shipper="Python",
        protocol="otlp",
        tested=True,
        text="""\
# pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
import logging
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider, LoggingHandler
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource

provider = LoggerProvider(resource=Resource.create({{"service.name": "shop/app"}}))
exporter = OTLPLogExporter(endpoint="{url}/v1/logs")
provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
logging.getLogger().addHandler(LoggingHandler(logger_provider=provider))
logging.warning("the first line")
provider.shutdown()  # at the end of the program: it sends what is left
""",
        key='# exporter: OTLPLogExporter(endpoint=..., headers={{"authorization": "Bearer KEY"}})\n',
    ),
    "node": Snippet(
        shipper="Node",
        protocol="lines",
        text="""\
// Node 18 or later, without a package. A request with a key of its own may be repeated, and is in once.
const send = (records) => fetch('{url}/api/v1/lines?workload=shop/app', {{
  method: 'POST',
  headers: {{ 'Content-Type': 'application/x-ndjson', 'Idempotency-Key': crypto.randomUUID() }},
  body: records.map((one) => JSON.stringify(one)).join('\\n'),
}});
send([{{ timestamp: new Date().toISOString(), level: 'warn', message: 'the first line' }}])
  .then((answer) => console.log(answer.status));
""",
        key="// with: Authorization: 'Bearer KEY' in headers\n",
    ),
}  # fmt: skip


# rsyslog over RELP waits for the answer to each line, and loses none while it has room for its queue.
RSYSLOG_RELP: Final = Snippet(
    shipper="rsyslog",
    protocol="relp",
    tested=True,
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
    chosen = (chosen_snippet(name, urls) for name in SNIPPETS)
    return [(one.shipper, one.line.format(**_places(url))) for one, url in chosen if one.line]


def snippet_text(name: str, urls: Sequence[str], *, keyed: bool) -> str:
    """The configuration of one shipper. `keyed`: requests over HTTP need a key."""
    one, url = chosen_snippet(name, urls)
    return (one.text + (one.key if keyed else "")).format(**_places(url))


def of_scheme(urls: Sequence[str], begin: str) -> str | None:
    """The first listener whose scheme begins so."""
    return next((url for url in urls if url.startswith(begin)), None)


def intake_urls(settings: Settings) -> Sequence[str]:
    """Where senders find the intake: that of the running stack, else that of the settings."""
    state = running(settings.data.dir)
    if state is not None and state.get("redis_url") == settings.redis.url:
        found = state.get("intake")
        return [str(url) for url in found] if isinstance(found, list) else []
    return [Listener.parse(text).address for text in settings.intake.listeners]


def chosen_snippet(name: str, urls: Sequence[str]) -> tuple[Snippet, str]:
    """The snippet of this name for these listeners, and the address that it sends to."""
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
