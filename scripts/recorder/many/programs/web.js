// The pages of the shop: asks catalogue, search and orders, and checks what they say. Logs JSON as winston does.
'use strict';
const { trace, UpstreamError, Refused, hooks, call, serve, releaseFault } = require('./common');

function log(level, message, facts) {
  const head = { level, message, service: 'web', timestamp: new Date().toISOString() };
  const id = trace() ? { trace_id: trace() } : {};
  process.stdout.write(JSON.stringify({ ...head, ...id, ...facts }) + '\n');
}

function priced(product) {
  if (typeof product.price !== 'number' || product.price <= 0) {
    log('error', 'product has no valid price', { product: product.id, price: product.price });
    throw new UpstreamError(`catalog gave product ${product.id} without a valid price`);
  }
  return `${product.name}: ${product.price.toFixed(2)} EUR`;
}

async function home(match, query) {
  // Release fault 0: the page number became a word. Release fault 1: a template that is not in the image.
  const number = releaseFault === 0 ? 'first' : query.get('page') || 0;
  let products = await call('catalog', 'GET', `/products?page=${number}`);
  if (hooks.variant('exception') !== null) products = { products };
  const shown = products.map(priced);
  log('info', 'page rendered', { page: 'home', products: shown.length });
  return { page: shown };
}

async function product(match) {
  const found = await call('catalog', 'GET', `/products/${match[1]}`);
  const near = await call('search', 'GET', `/search?q=${encodeURIComponent(found.name.split(' ')[0])}&limit=4`);
  if (releaseFault === 1) require('./templates/product');
  const variant = hooks.variant('exception');
  const related = variant === null ? near.hits : near.hits.related.slice(0, 3);
  log('info', 'page rendered', { page: 'product', product: found.id, related: related.length });
  return { page: priced(found), stock: found.stock, related };
}

async function search(match, query) {
  const found = await call('search', 'GET', `/search?q=${encodeURIComponent(query.get('q') || '')}&limit=10`);
  if (!Array.isArray(found.hits) || found.hits.length > 10) {
    log('error', 'search answer is malformed', { hits: typeof found.hits, total: found.total });
    throw new UpstreamError('search answered without a list of hits');
  }
  const first = found.hits.slice(0, 2);
  const shown = [];
  for (const id of first) {
    try {
      shown.push(priced(await call('catalog', 'GET', `/products/${id}`)));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      log('warn', 'search hit is not in the catalog', { product: id });
    }
  }
  log('info', 'page rendered', { page: 'search', hits: found.total });
  return { hits: found.hits, shown };
}

async function cart(match, query, body) {
  const found = await call('orders', 'POST', `/carts/${match[1]}`, body);
  if (found.items < 1) log('error', 'cart is empty after an item was added', { cart: match[1], items: found.items });
  return found;
}

async function checkout(match, query, body) {
  const found = await call('orders', 'POST', '/orders', body, 5000);
  if (!found.order) {
    log('error', 'order has no number', { cart: body.cart, total: found.total });
    throw new UpstreamError('orders answered without an order number');
  }
  log('info', 'checkout completed', { order: found.order, total: found.total });
  return { created: true, order: found.order };
}

async function order(match) {
  const found = await call('orders', 'GET', `/orders/${match[1]}`);
  if (!found.state) throw new UpstreamError(`orders gave no state of order ${match[1]}`);
  return found;
}

serve('web', log, [
  ['GET', /^\/$/, home],
  ['GET', /^\/product\/(\d+)$/, product],
  ['GET', /^\/search$/, search],
  ['POST', /^\/cart\/(\w+)$/, cart],
  ['POST', /^\/checkout$/, checkout],
  ['GET', /^\/order\/(\d+)$/, order],
], (request, status, bytes, ms) => {
  const level = status >= 500 ? 'error' : 'info';
  const path = request.url;
  log(level, 'request completed', { method: request.method, path, status, bytes, duration_ms: Math.round(ms * 10) / 10 });
});
