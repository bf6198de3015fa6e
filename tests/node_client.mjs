// A program that logs by a client of npm: `node node_client.mjs CLIENT URL NAME`, with the packages in NODE_PATH's place.
//
// Each line of standard input, `FIRST LAST`, is a range of orders to log; "." answers it once they are handed over.
import { createRequire } from "node:module";
import readline from "node:readline";

const [client, url, name, packages] = process.argv.slice(2);
const need = createRequire(`${packages}/`);

async function otlp(exporter) {
  const { LoggerProvider, BatchLogRecordProcessor } = need("@opentelemetry/sdk-logs");
  const { resourceFromAttributes } = need("@opentelemetry/resources");
  const processor = new BatchLogRecordProcessor({
    exporter, maxExportBatchSize: 10, scheduledDelayMillis: 100, exportTimeoutMillis: 60000,
  });
  const provider = new LoggerProvider({
    resource: resourceFromAttributes({ "service.name": name }), processors: [processor],
  });
  const logger = provider.getLogger(name);
  return (text) => logger.emit({ body: text, severityNumber: 9, timestamp: Date.now() });
}

const clients = {
  "otlp-http": () => {
    const { OTLPLogExporter } = need("@opentelemetry/exporter-logs-otlp-proto");
    return otlp(new OTLPLogExporter({ url: `${url}/v1/logs`, timeoutMillis: 60000 }));
  },
  "otlp-json": () => {
    const { OTLPLogExporter } = need("@opentelemetry/exporter-logs-otlp-http");
    return otlp(new OTLPLogExporter({ url: `${url}/v1/logs`, timeoutMillis: 60000 }));
  },
  "otlp-grpc": () => {
    const { OTLPLogExporter } = need("@opentelemetry/exporter-logs-otlp-grpc");
    return otlp(new OTLPLogExporter({ url: url.replace("grpc:", "http:"), timeoutMillis: 60000 }));
  },
  "winston-loki": () => {
    const winston = need("winston");
    const Loki = need("winston-loki");
    const transport = new Loki({
      host: url, labels: { app: name }, interval: 0.2, json: false, batching: true, clearOnError: false,
      format: winston.format.printf((info) => info.message), onConnectionError: () => {},
    });
    transport.batcher.circuitBreakerInterval = 500;  // its pause after an error is a minute
    const logger = winston.createLogger({ transports: [transport] });
    return (text) => logger.info(text);
  },
  "pino-elasticsearch": () => {
    const stream = need("pino-elasticsearch")({
      index: name, node: url, esVersion: 8, opType: "create", flushBytes: 300, flushInterval: 200,
    });
    stream.on("error", (error) => console.error(error));
    const logger = need("pino")({ level: "info" }, stream);
    return (text) => logger.info(text);
  },
};

const log = await clients[client]();
for await (const line of readline.createInterface({ input: process.stdin })) {
  const [first, last] = line.split(" ").map(Number);
  for (let order = first; order < last; order += 1) {
    log(`${name} order ${order} was paid`);
    await new Promise((done) => setTimeout(done, 2));  // winston-loki writes milliseconds
  }
  console.log(".");
}
