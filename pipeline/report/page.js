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
  const buckets = data.timeline.buckets;
  let pick = () => show(); // two buckets, -1 for none
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

  // Findings: chosen by level, workload, text and a stretch of the timeline, in one of four orders.
  const cards = [...document.querySelectorAll(".finding")].map((node) => {
    const slot = document.createComment(""); // its place in its incident
    node.before(slot);
    return {
      node,
      slot,
      first: Number(node.dataset.first),
      last: Number(node.dataset.last),
      level: node.dataset.level,
      workload: node.dataset.workload,
      urgency: Number(node.dataset.urgency),
      count: Number(node.dataset.count),
      text: node.textContent.toLowerCase(),
    };
  });
  const incidents = [...document.querySelectorAll(".incident")].map((node) => ({
    node,
    cards: [...node.querySelectorAll(".finding")],
    rest: node.querySelector(".rest"),
    opened: false, // by a filter, which closes it again
  }));
  const picks = [...document.querySelectorAll(".pick")];
  const chosen = { level: new Set(), workload: new Set(), text: [], from: null, to: null, order: "" };
  const orders = {
    time: (a, b) => !a.first - !b.first || a.first - b.first, // those without a time come last
    severity: (a, b) => b.urgency - a.urgency,
    count: (a, b) => b.count - a.count,
  };
  const flat = $("flat");
  const arrange = () => {
    const by = orders[chosen.order];
    if (by) flat.append(...[...cards].sort(by).map((card) => card.node));
    else for (const card of cards) card.slot.after(card.node);
    flat.hidden = !by;
    $("list").hidden = Boolean(by);
  };
  const fits = {
    level: (card) => !chosen.level.size || chosen.level.has(card.level),
    workload: (card) => !chosen.workload.size || chosen.workload.has(card.workload),
    text: (card) => chosen.text.every((w) => card.text.includes(w)),
    time: (card) => chosen.from === null || (card.first < chosen.to && card.last >= chosen.from),
  };
  const show = () => {
    const tests = Object.entries(fits);
    const shown = cards.filter((card) => {
      card.node.hidden = !tests.every(([, fit]) => fit(card));
      return !card.node.hidden;
    });
    for (const button of picks) {
      const { by, value } = button.dataset;
      // The number of findings that a click adds or that are chosen by it, under the other filters.
      const count = cards.filter((card) => card[by] === value && tests.every(([name, fit]) => name === by || fit(card))).length;
      button.setAttribute("aria-pressed", String(chosen[by].has(value)));
      button.classList.toggle("none", !count);
      button.querySelector("span").textContent = number(count);
    }
    const parts = [...chosen.level, ...chosen.workload];
    if (chosen.from !== null) parts.push(utc(chosen.from) + " – " + utc(chosen.to).slice(11) + " UTC");
    if (chosen.text.length) parts.push("“" + chosen.text.join(" ") + "”");
    $("shown").textContent = parts.length
      ? number(shown.length) + " of " + number(cards.length) + (cards.length === 1 ? " finding" : " findings") + " shown: " + parts.join(", ")
      : "";
    $("clear").hidden = !parts.length;
    for (const incident of incidents) {
      incident.node.hidden = incident.cards.every((node) => node.hidden);
      if (!incident.rest) continue;
      if (parts.length && !incident.rest.open) incident.rest.open = incident.opened = true;
      else if (!parts.length && incident.opened) incident.rest.open = incident.opened = false;
    }
  };

  // The address holds what was chosen, as `#level=error&workload=shop`; `#f1.2` is a finding.
  const remember = () => {
    const state = new URLSearchParams();
    for (const by of ["level", "workload"]) for (const value of chosen[by]) state.append(by, value);
    if (chosen.text.length) state.set("text", chosen.text.join(" "));
    if (chosen.from !== null) { state.set("from", chosen.from); state.set("to", chosen.to); }
    if (chosen.order) state.set("order", chosen.order);
    const hash = state.size ? "#" + state : "";
    if (hash === location.hash || (!hash && !location.hash.includes("="))) return;
    try { history.replaceState(null, "", hash || location.pathname + location.search); } catch { location.hash = hash; }
  };
  const recall = () => {
    if (!location.hash.includes("=")) return false;
    const state = new URLSearchParams(location.hash.slice(1));
    for (const by of ["level", "workload"]) {
      chosen[by] = new Set(state.getAll(by).filter((value) => cards.some((card) => card[by] === value)));
    }
    chosen.text = words(state.get("text") || "");
    $("find").value = chosen.text.join(" ");
    chosen.order = orders[state.get("order")] ? state.get("order") : "";
    $("order").value = chosen.order;
    const [from, to] = [Number(state.get("from")), Number(state.get("to"))];
    const inside = buckets.map((b, i) => (from < to && b[0] < to && b[0] + data.timeline.bucket_s > from ? i : -1)).filter((i) => i >= 0);
    arrange();
    pick(...(inside.length ? [inside[0], inside.at(-1)] : [-1, -1]));
    return true;
  };
  const changed = () => { show(); remember(); };
  const reveal = () => {
    if (recall()) return;
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    const rest = target && target.closest(".rest");
    if (rest) rest.open = true;
    if (target && target.closest(".finding[hidden], .incident[hidden]")) { // a filter hides it
      $("clear").click();
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", reveal);
  $("find").addEventListener("input", later(() => { chosen.text = words($("find").value); changed(); }));
  $("order").addEventListener("change", () => { chosen.order = $("order").value; arrange(); changed(); });
  for (const button of picks) {
    button.addEventListener("click", () => {
      const { by, value } = button.dataset;
      if (!chosen[by].delete(value)) chosen[by].add(value);
      changed();
    });
  }

  // A command is copied; where a browser forbids that, it is selected.
  $("findings").addEventListener("click", async (event) => {
    const button = event.target.closest(".copy");
    if (!button) return;
    const command = button.closest("details").querySelector("pre");
    let done = "Copied";
    try {
      await navigator.clipboard.writeText(command.textContent);
    } catch {
      getSelection().selectAllChildren(command);
      done = "Selected";
    }
    button.textContent = $("said").textContent = done;
    setTimeout(() => { button.textContent = "Copy"; $("said").textContent = ""; }, 2000);
  });

  // Timeline: hover or arrow keys read a bucket; click, drag or Enter choose a stretch.
  const chart = document.querySelector(".chart svg");
  if (chart && buckets.length) {
    const hits = [...chart.querySelectorAll(".hit")];
    const band = chart.querySelector(".picked");
    const rest = $("read").textContent + " Click, drag or Shift and arrow keys choose a time.";
    $("read").textContent = rest;
    let at = -1;
    let start = -1;
    const read = (i) => {
      hits.forEach((hit, k) => hit.classList.toggle("on", k === i));
      at = i;
      if (i < 0) { $("read").textContent = rest; return; }
      const [begin, lines, odd] = buckets[i];
      chart.setAttribute("aria-valuenow", i);
      $("read").textContent = utc(begin) + " – " + utc(begin + data.timeline.bucket_s).slice(11) + " UTC: "
        + number(lines) + (lines === 1 ? " line, " : " lines, ") + number(odd) + " anomalous";
      chart.setAttribute("aria-valuetext", $("read").textContent);
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
    let from = -1; // where a stretch picked with Shift begins
    chart.setAttribute("role", "slider");
    chart.setAttribute("aria-valuemin", 0);
    chart.setAttribute("aria-valuemax", buckets.length - 1);
    for (const [name, value] of [["valuenow", 0], ["valuetext", rest]]) chart.setAttribute("aria-" + name, value);
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
    chart.addEventListener("pointerup", (event) => { if (start >= 0) { pick(start, place(event)); remember(); } start = -1; });
    chart.addEventListener("pointercancel", () => { start = -1; });
    chart.setAttribute("tabindex", "0");
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) {
        if (event.shiftKey && from < 0) from = Math.max(at, 0);
        else if (!event.shiftKey) from = -1;
        read(Math.max(0, Math.min(buckets.length - 1, at + step)));
        if (event.shiftKey) pick(from, at);
      } else if (event.key === "Enter" && at >= 0) pick(at, at);
      else if (event.key === "Escape") pick(-1, -1);
      else return;
      remember();
      event.preventDefault();
    });
  }
  $("clear").addEventListener("click", () => {
    for (const by of ["level", "workload"]) chosen[by].clear();
    chosen.text = [];
    $("find").value = "";
    pick(-1, -1);
    remember();
    $("find").focus({ preventScroll: true });
  });

  // Templates: rows are [id, template, lines, first, last, label of the finding or "", place, sample].
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
  const opened = (row) => { // the template, which opens its sample
    const details = make("details");
    const figure = make("figure");
    figure.append(make("figcaption", "", row[6]), make("pre", "", row[7]));
    details.append(make("summary", "", row[1]), figure);
    return details;
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
      cell(tr, "text", row.length > 6 ? opened(row) : row[1]);
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
