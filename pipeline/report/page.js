"use strict";
(() => {
  // Log text is hostile: it reaches the page through textContent only, never as markup.
  const $ = (id) => document.getElementById(id);
  const make = (tag, cls, text) => {
    const node = document.createElement(tag);
    if (cls) node.className = cls;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const data = JSON.parse($("data").textContent);
  const number = (n) => n.toLocaleString("en-US");
  const utc = (s) => new Date(s * 1000).toISOString().slice(0, 19).replace("T", " ");
  const local = (s) => new Date(s * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
  const words = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
  const later = (fn) => {
    let timer = 0;
    return () => { clearTimeout(timer); timer = setTimeout(fn, 120); };
  };
  document.documentElement.classList.add("has-js");
  for (const node of document.querySelectorAll("time")) node.title = local(Date.parse(node.dateTime) / 1000) + ", local time";

  // Findings: filtered by text and by a stretch of the timeline.
  const cards = [...document.querySelectorAll(".finding")].map((node) => ({
    node,
    first: Number(node.dataset.first),
    last: Number(node.dataset.last),
    text: node.textContent.toLowerCase(),
  }));
  const incidents = [...document.querySelectorAll(".incident")].map((node) => ({
    node,
    cards: [...node.querySelectorAll(".finding")],
    rest: node.querySelector(".rest"),
    opened: false, // by a filter, which closes it again
  }));
  const reveal = () => {
    const rest = location.hash.length > 1 && document.getElementById(location.hash.slice(1))?.closest(".rest");
    if (rest) rest.open = true;
  };
  const chosen = { text: [], from: null, to: null };
  const show = () => {
    let visible = 0;
    for (const card of cards) {
      const hit = chosen.text.every((w) => card.text.includes(w))
        && (chosen.from === null || (card.first < chosen.to && card.last >= chosen.from));
      card.node.hidden = !hit;
      visible += hit ? 1 : 0;
    }
    const parts = [];
    if (chosen.from !== null) parts.push(utc(chosen.from) + " – " + utc(chosen.to).slice(11) + " UTC");
    if (chosen.text.length) parts.push("“" + chosen.text.join(" ") + "”");
    $("shown").textContent = parts.length ? number(visible) + " of " + number(cards.length) + " shown: " + parts.join(", ") : "";
    $("clear").hidden = !parts.length;
    for (const incident of incidents) {
      incident.node.hidden = incident.cards.every((node) => node.hidden);
      if (!incident.rest) continue;
      if (parts.length && !incident.rest.open) incident.rest.open = incident.opened = true;
      else if (!parts.length && incident.opened) incident.rest.open = incident.opened = false;
    }
  };
  addEventListener("hashchange", reveal);
  $("find").addEventListener("input", later(() => { chosen.text = words($("find").value); show(); }));

  // Timeline: hover or arrow keys read a bucket; click, drag or Enter choose a stretch.
  const chart = document.querySelector(".chart svg");
  const buckets = data.timeline.buckets;
  let pick = () => {};
  if (chart && buckets.length) {
    const hits = [...chart.querySelectorAll(".hit")];
    const band = chart.querySelector(".picked");
    const rest = $("read").textContent + " Click or drag to see the findings of that time.";
    $("read").textContent = rest;
    let at = -1;
    let start = -1;
    const read = (i) => {
      hits.forEach((hit, k) => hit.classList.toggle("on", k === i));
      at = i;
      if (i < 0) { $("read").textContent = rest; return; }
      const [begin, lines, odd] = buckets[i];
      $("read").textContent = utc(begin) + " – " + utc(begin + data.timeline.bucket_s).slice(11) + " UTC: "
        + number(lines) + (lines === 1 ? " line, " : " lines, ") + number(odd) + " anomalous";
    };
    const place = (event) => {
      const box = chart.getBoundingClientRect();
      return Math.max(0, Math.min(buckets.length - 1, Math.floor((event.clientX - box.left) / box.width * buckets.length)));
    };
    pick = (a, b) => {
      const none = a < 0;
      band.setAttribute("x", none ? 0 : Math.min(a, b));
      band.setAttribute("width", none ? 0 : Math.abs(a - b) + 1);
      chosen.from = none ? null : buckets[Math.min(a, b)][0];
      chosen.to = none ? null : buckets[Math.max(a, b)][0] + data.timeline.bucket_s;
      show();
    };
    for (const hit of hits) hit.replaceChildren(); // the readout replaces the built-in tips
    chart.addEventListener("pointermove", (event) => {
      read(place(event));
      if (start >= 0 && at !== start) pick(start, at);
    });
    chart.addEventListener("pointerleave", () => { if (start < 0) read(-1); });
    chart.addEventListener("pointerdown", (event) => {
      start = place(event);
      if (event.pointerType === "mouse") chart.setPointerCapture(event.pointerId);
    });
    chart.addEventListener("pointerup", (event) => { if (start >= 0) pick(start, place(event)); start = -1; });
    chart.addEventListener("pointercancel", () => { start = -1; });
    chart.setAttribute("tabindex", "0");
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) read(Math.max(0, Math.min(buckets.length - 1, at + step)));
      else if (event.key === "Enter" && at >= 0) pick(at, at);
      else if (event.key === "Escape") pick(-1, -1);
      else return;
      event.preventDefault();
    });
  }
  $("clear").addEventListener("click", () => {
    chosen.text = [];
    $("find").value = "";
    pick(-1, -1);
    show();
    $("find").focus();
  });

  // Templates: rows are [id, template, lines, first, last, label of the finding or ""].
  const table = $("table");
  const body = table.tBodies[0];
  const STEP = 200; // rows drawn at once: quick on a phone
  const rows = data.templates.map((row) => ({ row, text: row[1].toLowerCase() }));
  const sort = { key: 2, down: true };
  let limit = STEP;
  const cell = (tr, cls, child) => { const td = make("td", cls); td.append(child); tr.append(td); };
  const when = (s) => {
    const node = make("time", "", utc(s));
    node.dateTime = new Date(s * 1000).toISOString();
    node.title = local(s) + ", local time";
    return node;
  };
  const place = (label) => { // 2.10 stands behind 2.9
    const [incident, finding] = label.split(".").map(Number);
    return label ? incident * 1e6 + finding : 0;
  };
  const draw = () => {
    const wanted = words($("search").value);
    const match = rows.filter((r) => wanted.every((w) => r.text.includes(w)));
    match.sort((a, b) => {
      const x = sort.key === 1 ? a.text : sort.key === 5 ? place(a.row[5]) : a.row[sort.key];
      const y = sort.key === 1 ? b.text : sort.key === 5 ? place(b.row[5]) : b.row[sort.key];
      // Templates without a finding stay below the others, whichever way the column is sorted.
      if (sort.key === 5 && !x !== !y) return x ? -1 : 1;
      const order = x < y ? -1 : x > y ? 1 : a.row[0] - b.row[0];
      return sort.down ? -order : order;
    });
    const drawn = match.slice(0, limit).map(({ row }) => {
      const tr = make("tr");
      cell(tr, "text", row[1]);
      cell(tr, "num", number(row[2]));
      for (const s of row.slice(3, 5)) cell(tr, "when", s ? when(s) : "");
      const link = row[5] ? make("a", "", row[5]) : "";
      if (link) link.href = "#f" + row[5];
      cell(tr, "num", link);
      cell(tr, "num", String(row[0]));
      return tr;
    });
    body.replaceChildren(...drawn);
    const all = data.templates_total > rows.length ? " (" + number(data.templates_total) + " in the run)" : "";
    $("matched").textContent = wanted.length
      ? number(match.length) + " of " + number(rows.length) + " templates match" + all
      : number(rows.length) + (rows.length === 1 ? " template" : " templates") + all;
    $("more").hidden = match.length <= limit;
    $("more").textContent = "Show " + number(match.length - limit) + " more";
  };
  for (const th of table.tHead.rows[0].cells) {
    const button = make("button", "", th.textContent);
    button.type = "button";
    const key = Number(th.dataset.key);
    button.addEventListener("click", () => {
      sort.down = sort.key === key ? !sort.down : key === 2 || key === 4;
      sort.key = key;
      limit = STEP;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      draw();
    });
    th.replaceChildren(button);
  }
  $("search").addEventListener("input", later(() => { limit = STEP; draw(); }));
  $("more").addEventListener("click", () => { limit = Infinity; draw(); });
  body.addEventListener("click", (event) => {
    // A finding that a filter hides could not be jumped to.
    const link = event.target.closest("a");
    if (link && !$("clear").hidden) $("clear").click();
    if (link && link.hash === location.hash) setTimeout(reveal); // no hash changes
  });
  draw();
  show();
  reveal();
})();
