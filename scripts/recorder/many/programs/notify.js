// Sends mail: renders a template, and hands the message to a mail relay (a file on disk). Logs plain text.
'use strict';
const fs = require('fs');
const { trace, hooks, serve, releaseFault, Refused } = require('./common');

function log(level, message, facts) {
  const { stack, ...rest } = facts;
  const pairs = Object.entries(rest).map(([key, value]) => ` ${key}=${/[ "=]/.test(value) ? JSON.stringify(value) : value}`);
  const id = trace() ? ` trace_id=${trace()}` : '';
  const tail = stack ? `\n${stack}` : '';
  process.stdout.write(`${new Date().toISOString()} ${level.toUpperCase().padEnd(5)} [notify] ${message}${pairs.join('')}${id}${tail}\n`);
}

const TEMPLATES = { fulfilled: (order) => `Your order ${order} is on its way.` };
let number = 0;

async function send(match, query, mail) {
  if (releaseFault === 1) throw new Refused(400, 'template version is required'); // of the next API version
  const name = releaseFault === 0 ? `${mail.template}.v2` : mail.template; // release fault 0: a missing template
  const exception = hooks.variant('exception');
  const text = exception === 0 ? TEMPLATES.shipped(mail.order) : TEMPLATES[name](mail.order);
  const address = exception === 1 ? mail.recipient.address : `customer-${mail.order % 400}@shop.example`;
  number += 1;
  await fs.promises.appendFile(`${process.env.HOME}/mail.out`, `${address} ${text}\n`);
  log('info', 'mail sent', { order: mail.order, to: address, bytes: text.length, message: number });
  if (hooks.variant('wrong') !== null) return { queued: true };
  return { message: number };
}

serve('notify', log, [['POST', /^\/mails$/, send]], (request, status, bytes, ms) => {
  log(status >= 500 ? 'error' : 'info', `${request.method} ${request.url} ${status}`, { duration_ms: ms.toFixed(1) });
});
