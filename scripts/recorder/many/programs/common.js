// What the Node services of the set share: a log function, a trace id per request, HTTP both ways, and the
// door for faults: the recorder writes $FAULT_FILE, and the service's code takes a wrong turn.
'use strict';
const fs = require('fs');
const http = require('http');
const crypto = require('crypto');
const { AsyncLocalStorage } = require('async_hooks');

const PORTS = { web: 28001, catalog: 28002, search: 28003, orders: 28004, payments: 28005, notify: 28006 };
const STATS_MS = 5000;
const RETRIES_MS = [300, 700];
const context = new AsyncLocalStorage();
const trace = () => context.getStore();

class UpstreamError extends Error {}
class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

const hooks = {
  turn: 0,
  kept: [],
  current() {
    try {
      return JSON.parse(fs.readFileSync(process.env.FAULT_FILE || '/nonexistent', 'utf8'));
    } catch { return {}; }
  },
  // Which wrong turn of `kind` this request takes; null: none. Notes the trace that took it.
  variant(kind) {
    const now = this.current();
    if (now.kind !== kind) return null;
    this.turn += 1;
    if (this.turn % 10 >= (now.share ?? 1) * 10) return null;
    if (trace()) fs.appendFileSync(process.env.FAULT_FILE.replace(/\.json$/, '.traces'), trace() + '\n');
    return now.variant ?? 0;
  },
  async before() {
    const now = this.current();
    if (now.kind === 'latency' && this.variant('latency') !== null) {
      await new Promise((done) => setTimeout(done, (now.seconds ?? 1.2) * 1000));
    } else if (now.kind === 'cpu' && this.variant('cpu') !== null) {
      const until = process.cpuUsage().user + (now.seconds ?? 0.35) * 1e6;
      while (process.cpuUsage().user < until) /^(a+)+$/.test('a'.repeat(16) + 'b');
    } else if (now.kind === 'memory' && this.variant('memory') !== null) {
      for (let mib = 0; mib < (now.mib ?? 12); mib++) this.kept.push(Array.from({ length: 131072 }, () => ({}.x)));
    }
  },
};

// The JSON answer of another service; asks again where it is just starting. Throws UpstreamError and Refused (4xx).
async function call(service, method, path, body, timeoutMs = 3000) {
  for (const waitMs of RETRIES_MS) {
    try {
      return await ask(service, method, path, body, timeoutMs);
    } catch (error) {
      if (!error.message.includes('ECONNREFUSED')) throw error;
      await new Promise((done) => setTimeout(done, waitMs));
    }
  }
  return ask(service, method, path, body, timeoutMs);
}

function ask(service, method, path, body, timeoutMs) {
  return new Promise((done, fail) => {
    const where = `${service} ${method} ${path.split('?')[0]}`;
    const port = process.env[`${service.toUpperCase()}_PORT`] || PORTS[service];
    const headers = { 'X-Trace-Id': trace() || '', 'Content-Type': 'application/json' };
    const request = http.request({ host: '127.0.0.1', port, method, path, headers, agent: false }, (answer) => {
      const parts = [];
      answer.on('data', (part) => parts.push(part));
      answer.on('error', (error) => fail(new UpstreamError(`${where}: ${error.message}`)));
      answer.on('end', () => {
        if (answer.statusCode >= 500) return fail(new UpstreamError(`${where} answered ${answer.statusCode}`));
        let found;
        try { found = JSON.parse(Buffer.concat(parts)); } catch (error) { return fail(error); }
        if (answer.statusCode >= 400) return fail(new Refused(answer.statusCode, found.error || 'refused'));
        done(found);
      });
    });
    request.setTimeout(timeoutMs, () => request.destroy(new Error(`timeout of ${timeoutMs} ms exceeded`)));
    request.on('error', (error) => fail(new UpstreamError(`${where}: ${error.message}`)));
    request.end(body === undefined ? undefined : JSON.stringify(body));
  });
}

// routes: [method, pattern, handler(match, query, body)]; a handler returns a body or throws.
function serve(service, log, routes, report) {
  const port = PORTS[service];
  log('info', 'starting', { version: process.env.RELEASE || '1.0.0', pid: process.pid });
  const answer = async (request, body) => {
    const url = new URL(request.url, 'http://localhost');
    for (const [method, pattern, handle] of routes) {
      const match = pattern.exec(url.pathname);
      if (match && method === request.method) {
        await hooks.before();
        return handle(match, url.searchParams, body);
      }
    }
    throw new Refused(404, 'no such route');
  };
  const server = http.createServer((request, response) => {
    const parts = [];
    request.on('data', (part) => parts.push(part));
    request.on('end', () => {
      const text = Buffer.concat(parts).toString();
      context.run(request.headers['x-trace-id'] || crypto.randomUUID(), async () => {
        const begun = process.hrtime.bigint();
        let status = 200;
        let found;
        try {
          if (request.url === '/healthz') found = { status: 'ok' };
          else found = await answer(request, text ? JSON.parse(text) : null);
          if (found && found.created) status = 201;
        } catch (error) {
          if (error instanceof Refused) {
            status = error.status;
            log('warn', 'request refused', { path: request.url, status, reason: error.message });
          } else if (error instanceof UpstreamError) {
            status = 502;
            log('error', 'upstream failed', { path: request.url, error: error.message });
          } else {
            status = 500;
            log('error', 'unhandled error', { path: request.url, stack: error.stack });
          }
          found = { error: status >= 500 ? 'internal error' : error.message };
        }
        const data = Buffer.from(JSON.stringify(found));
        const ms = Number(process.hrtime.bigint() - begun) / 1e6;
        if (request.url !== '/healthz') report(request, status, data.length, ms);
        response.writeHead(status, { 'Content-Type': 'application/json', 'Content-Length': data.length });
        response.end(data);
      });
    });
  });
  let spent = process.cpuUsage();
  let due = Date.now() + STATS_MS;
  setInterval(() => {
    const now = process.cpuUsage(spent);
    spent = process.cpuUsage();
    log('info', 'runtime stats', {
      rss_mb: process.memoryUsage().rss >> 20,
      heap_mb: process.memoryUsage().heapUsed >> 20,
      cpu_pct: Math.round((now.user + now.system) / STATS_MS / 10),
      lag_ms: Math.max(0, Date.now() - due),
    });
    due = Date.now() + STATS_MS;
  }, STATS_MS);
  process.on('SIGTERM', () => {
    log('info', 'shutting down', {});
    server.close();
    setTimeout(() => process.exit(0), 300); // requests that are under way
  });
  server.listen(port, '127.0.0.1', 511, () => log('info', 'listening', { port }));
}

const releaseFault = process.env.RELEASE_FAULT ? Number(process.env.RELEASE_FAULT) : null;
module.exports = { trace, UpstreamError, Refused, hooks, call, serve, releaseFault };
