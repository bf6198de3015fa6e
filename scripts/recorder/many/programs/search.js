// Full-text search over an index in memory, loaded from the catalogue at the start. Logs JSON as pino does.
'use strict';
const { trace, hooks, call, serve, releaseFault, UpstreamError } = require('./common');

const LEVELS = { info: 30, warn: 40, error: 50 };
function log(level, message, facts) {
  const id = trace() ? { trace_id: trace() } : {};
  const head = { level: LEVELS[level], time: Date.now(), name: 'search' };
  process.stdout.write(JSON.stringify({ ...head, ...id, ...facts, msg: message }) + '\n');
}

const index = new Map(); // word -> ids
function add({ id, name }) {
  for (const word of name.toLowerCase().split(/\W+/)) {
    // Release fault 0: the index of the new version has no entry for a word that it does not know.
    if (releaseFault !== 0 && !index.has(word)) index.set(word, new Set());
    index.get(word).add(id);
  }
}

async function search(match, query) {
  const begun = performance.now();
  const words = (query.get('q') || '').toLowerCase().split(/\W+/).filter(Boolean);
  let hits = null;
  for (const word of words) {
    const ids = index.get(word) || new Set();
    hits = hits === null ? ids : new Set([...hits].filter((id) => ids.has(id)));
  }
  if (releaseFault === 1) hits = hits.sorted(); // release fault 1: a method of a library that is not there
  const exception = hooks.variant('exception');
  if (exception === 0) hits = index.get(words.join(' ')).values();
  if (exception === 1) hits = JSON.parse(`{"ids": [${[...hits].slice(0, 3)}`).ids;
  const total = hits === null ? 0 : hits.size;
  let found = [...(hits || [])].slice(0, Number(query.get('limit') || 10));
  const wrong = hooks.variant('wrong');
  if (wrong === 0) found = found.map((id) => id + 500000);
  if (wrong === 1) found = { ids: found };
  log('info', 'query answered', { words: words.length, hits: total, took_ms: Math.round((performance.now() - begun) * 100) / 100 });
  if (total === 0) log('warn', 'query without hits', { q: query.get('q') });
  return { total, hits: found };
}

async function reindex(match, query, products) {
  for (const product of products) add(product);
  log('info', 'documents indexed', { documents: products.length, words: index.size });
  return { indexed: products.length, words: index.size };
}

async function load(tries = 0) {
  try {
    for (let page = 0; page < 40; page++) {
      for (const product of await call('catalog', 'GET', `/products?page=${page}`)) add(product);
    }
    log('info', 'index loaded', { words: index.size });
  } catch (error) {
    log('error', 'index could not be loaded', { error: error.message, tries });
    if (error instanceof UpstreamError) setTimeout(() => load(tries + 1), 2000);
  }
}

serve('search', log, [
  ['GET', /^\/search$/, search],
  ['POST', /^\/index$/, reindex],
], (request, status, bytes, ms) => {
  log(status >= 500 ? 'error' : 'info', 'request completed', {
    method: request.method, url: request.url, statusCode: status, responseTime: Math.round(ms * 10) / 10,
  });
});
load();
