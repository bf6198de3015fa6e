// What the pages do beyond links and forms: live refresh, keys, undo, the palette, zones of time.
"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const say = (text) => { const place = $("#said"); if (place) place.textContent = text; };

  // Live: the stream carries names of changes alone; a page that shows such a thing asks for itself again.
  let stream = null, retry = null, waiting = false;
  const wanted = () => (document.body.dataset.live || "").split(" ").filter(Boolean);
  // Lines that follow stand still for somebody who reads further down, or has chosen one.
  let missed = false;
  const stopped = () => { missed = Boolean($("#live[data-tail]") && (scrollY > 300 || current())); return missed; };
  addEventListener("scroll", () => { if (missed && scrollY <= 300) { missed = false; refresh(); } }, { passive: true });
  const refresh = async () => {
    if (waiting || document.hidden || !$("#live")) return;
    waiting = true;
    await new Promise((done) => setTimeout(done, 150 + Math.random() * 350));
    waiting = false;
    if ($$("#live input[type=checkbox]:checked").length || $("#live details[open]") || stopped()) return;
    const before = $$("#live .card.incident").length, y = scrollY;
    const at = document.activeElement, inside = at.closest("#live"), row = at.closest("[data-row]:not(#live)"), words = at.textContent;
    try {
      await htmx.ajax("GET", location.pathname + location.search, { target: "#live", select: "#live", swap: "outerMorph" });
    } catch { return; }
    dress(document);
    // A button that has become another one must not stay under the finger: Enter twice would acknowledge and resolve.
    if (inside && (!at.isConnected || (at.matches("button") && at.textContent !== words))) (row?.isConnected ? row : $("#main")).focus({ preventScroll: true });
    scrollTo(0, y);
    const now = $$("#live .card.incident").length;
    if (now > before) say(`${now - before} new incident${now - before > 1 ? "s" : ""}`);
  };
  const follow = () => {
    if (stream || document.hidden || !wanted().length) return;
    const names = [...wanted(), ...($("#first") ? ["status"] : [])];
    stream = new EventSource(`/events?of=${encodeURIComponent(names.join(" "))}`);
    for (const name of names) stream.addEventListener(name, refresh);
    stream.onerror = () => {
      if (stream && stream.readyState === EventSource.CLOSED) {
        stream = null;
        clearTimeout(retry);
        retry = setTimeout(() => { follow(); refresh(); }, 5000);
      }
    };
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { stream?.close(); stream = null; } else { follow(); refresh(); }
  });
  document.addEventListener("lw-changed", refresh);

  // Times: UTC as the server writes them, or a zone. The address names it, so that a link shows the same times.
  const own = () => Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
  const known = (name) => { try { new Intl.DateTimeFormat("en", { timeZone: name }); return name; } catch { return "UTC"; } };
  const zone = () => {
    const asked = new URLSearchParams(location.search).get("zone");
    if (asked !== null) return known(asked);
    return localStorage.getItem("logweir-zone") === "local" ? own() : "UTC";
  };
  window.logweirZone = zone;  // charts write times, too
  const named = (name) => {
    const address = new URL(location.href);
    if (name === "UTC") address.searchParams.delete("zone"); else address.searchParams.set("zone", name);
    history.replaceState(history.state, "", address);
  };
  const zones = (root) => {
    const button = $("#zone"), there = zone();
    if (button) button.textContent = there.replaceAll("_", " ");
    for (const time of $$("time[datetime]", root)) {
      time.dataset.utc ??= time.textContent;
      if (!/\d\d:\d\d:\d\d/.test(time.dataset.utc)) continue;
      const at = new Date(time.dateTime);
      const date = (moment) => moment.toLocaleDateString("en", { timeZone: there });
      const others = [new Date(), new Date(time.dataset.beside ?? Date.now())];
      const year = at.getFullYear() === new Date().getFullYear() ? {} : { year: "numeric" };
      const day = others.every((other) => date(other) === date(at)) ? {} : { day: "numeric", month: "short", ...year };
      time.textContent = there !== "UTC" ? at.toLocaleString([], { ...day, timeZone: there, hour: "2-digit", minute: "2-digit", second: "2-digit" }) : time.dataset.utc;
    }
  };
  const dress = (root) => { zones(root); window.logweirCharts?.(root); };
  const switchZone = () => {
    const next = zone() === "UTC" ? own() : "UTC";
    localStorage.setItem("logweir-zone", next === "UTC" ? "utc" : "local");
    named(next);
    dress(document);
  };
  document.addEventListener("formdata", (event) => { if (event.target.matches(".filters") && zone() !== "UTC") event.formData.set("zone", zone()); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dress(document));

  // Notes go by themselves after ten seconds, unless somebody reads them.
  const away = (toast) => { const inside = toast.contains(document.activeElement); toast.remove(); if (inside) $("#main").focus({ preventScroll: true }); };
  const keep = (toast) => {
    if (toast.dataset.kept) return;
    toast.dataset.kept = "1";
    let left = setTimeout(() => away(toast), 10000);
    for (const name of ["mouseenter", "focusin"]) toast.addEventListener(name, () => clearTimeout(left));
    for (const name of ["mouseleave", "focusout"]) toast.addEventListener(name, () => { clearTimeout(left); left = setTimeout(() => away(toast), 4000); });
  };
  const toasts = $("#toasts");
  if (toasts) new MutationObserver((changes) => {
    const added = changes.flatMap((change) => [...change.addedNodes]).filter((node) => node.matches?.("[data-toast]"));
    const all = $$("[data-toast]", toasts), last = all.at(-1);
    all.filter((old, n) => n < all.length - 3 || (old !== last && old.matches(".bad") && old.textContent === last.textContent)).forEach((old) => old.remove());
    all.forEach(keep);
    if (added.some((toast) => !toast.matches(".bad"))) refresh();
  }).observe(toasts, { childList: true });

  // Items: j and k move, Enter opens, x chooses.
  const rows = () => $$("[data-row]").filter((row) => row.checkVisibility() && row.id !== "live");
  const current = () => $("[data-row].on");
  const move = (step) => {
    const all = rows(), at = all.indexOf(current());
    const next = all[Math.min(all.length - 1, Math.max(0, at + step))];
    if (!next) return;
    current()?.classList.remove("on");
    next.classList.add("on");
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  };
  const press = (key, scope) => {
    const place = scope || current() || $("#live");
    const button = place && ($(`button[data-key="${key}"]`, place) || $(`.head button[data-key="${key}"]`));
    button?.click();
    return Boolean(button);
  };
  // Voices press letters, too: somebody who speaks to the machine switches single keys off.
  const keysOff = () => localStorage.getItem("logweir-keys") === "off";
  const keysOn = $("#keys-on");
  if (keysOn) keysOn.checked = !keysOff();
  keysOn?.addEventListener("change", () => localStorage.setItem("logweir-keys", keysOn.checked ? "on" : "off"));
  // The second key comes within three seconds of the first by the times of the presses: a busy page gets them late.
  let marking = 0;
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select, dialog[open]");
    if ((event.metaKey || event.ctrlKey) && event.key === "k") { event.preventDefault(); openPalette(); return; }
    if (event.key === "Escape") { leave(event); return; }
    if (typing || keysOff() || event.metaKey || event.ctrlKey || event.altKey) return;
    const key = event.key;
    if (marking && event.timeStamp - marking < 3000 && (key === "n" || key === "a")) {
      marking = 0;
      markCurrent(key);
      return;
    }
    marking = 0;
    const does = {
      "/": openPalette, j: () => move(1), k: () => move(-1), x: () => $("input[type=checkbox]", current() || document)?.click(),
      t: switchZone, "?": () => $("#help")?.showModal(), m: () => { marking = event.timeStamp; },
      u: () => $$("[data-undo]").at(-1)?.click(), a: () => press("a", current()?.matches(".incident") ? current() : $(".head")),
      c: () => location.assign($("[data-compare]")?.href ?? "/compare"), y: copyLink, r: () => press("r"), s: () => press("s"), o: () => press("o"),
      Enter: () => current() && !event.target.closest("a, button, summary") && $("[data-open]", current())?.click(),
    }[key];
    if (does) { does(); if (key !== "Enter") event.preventDefault(); }
  });
  // A text field of search would only empty itself.
  const leave = (event) => {
    const open = $("dialog[open]");
    if (open) { event.preventDefault(); open.close(); return; }
    if (event.target.closest("input, textarea, select")) return;
    $(".top.open .menu")?.click();
    const row = current();
    if (row) { row.classList.remove("on"); row.blur(); if (missed) refresh(); }
  };
  const copied = (button, words) => { const write = navigator.clipboard?.writeText(words); write?.then(() => { say("copied"); if (button) button.textContent = "Copied"; }, () => say("not copied")); if (!write) say("this browser copies only over https"); };
  const copyLink = () => { const link = current() && $("a[data-open]", current()); copied(link ? null : $("[data-copy-link]"), link ? link.href : location.href); };
  const markCurrent = (key) => {
    const row = current();
    const button = row && $(`.mark button[data-mark="${key}"]`, row);
    if (button) { button.click(); return; }
    const box = row && $("input[name=pattern]", row);
    if (!box) return;
    for (const other of $$("input[name=pattern]:checked")) other.checked = false;
    box.checked = true;
    $(`.bulk button[value="${key === "n" ? "normal" : "anomalous"}"]`)?.click();
    box.checked = false;
  };

  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-close], [data-copy], [data-copy-link], #theme, #zone, #find, #open-help, .menu");
    if (!target) return;
    if (target.matches("[data-close]")) away(target.closest("[data-toast]"));
    else if (target.matches("[data-copy]")) {
      copied(target, $(target.dataset.copy).textContent);
    } else if (target.matches("[data-copy-link]")) copied(target, location.href);
    else if (target.id === "theme") {
      const dark = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
      const next = dark === "dark" ? "light" : "dark";
      document.documentElement.dataset.theme = next;
      localStorage.setItem("logweir-theme", next);
      dress(document);
    } else if (target.id === "zone") switchZone();
    else if (target.id === "find") openPalette();
    else if (target.id === "open-help") $("#help").showModal();
    else { const open = $(".top").classList.toggle("open"); target.setAttribute("aria-expanded", String(open)); }
  });
  // A form that htmx has sent leaves its checkboxes free again.
  document.addEventListener("htmx:after:request", (event) => {
    const undone = $("[data-undo]", event.target) && event.target.closest("[data-toast]");
    if (undone) away(undone);
    const kept = event.target.matches("form") && event.detail.ctx.response.status < 400;
    if (kept && event.target.id === "write") event.target.reset();
    if (kept) event.target.closest("#live details")?.removeAttribute("open");  // an open one would hold the page still
    if (event.target.matches("#chosen, #chosen button")) $$("#chosen input[type=checkbox]").forEach((box) => { box.checked = false; });
  });

  // The palette.
  const palette = $("#palette"), text = $("#palette-text"), hits = $("#palette-hits");
  const pages = $$("#pages a").map((link) => [link.textContent.trim(), link.getAttribute("href")]);
  const choices = () => {
    const value = text.value.trim(), low = value.toLowerCase();
    const found = pages.filter(([name]) => name.toLowerCase().includes(low)).slice(0, 6);
    if (/^t?\d{1,12}$/i.test(value)) found.unshift([`Pattern T${value.replace(/^t/i, "")}`, `/patterns/T${value.replace(/^t/i, "")}`]);
    if (value) {
      found.push([`Lines with “${value}”`, `/lines?q=${encodeURIComponent(value)}`]);
      found.push([`Patterns of workloads with “${value}”`, `/patterns?workload=${encodeURIComponent(value)}`]);
      if (/^[0-9a-f]{8,}$/i.test(value)) found.push([`Session or trace ${value}`, `/sessions?key=${encodeURIComponent(value)}`]);
    }
    return found;
  };
  const choose = (at) => {
    $$("a", hits).forEach((link, n) => { link.classList.toggle("on", n === at); link.ariaSelected = String(n === at); });
    text.setAttribute("aria-activedescendant", $(`#hit-${at}`) ? `hit-${at}` : "");
  };
  const draw = () => {
    hits.replaceChildren(...choices().map(([name, address], n) => {
      const item = document.createElement("li"), link = document.createElement("a");
      item.role = "none"; link.role = "option"; link.id = `hit-${n}`; link.tabIndex = -1;
      link.href = address; link.textContent = name;
      item.append(link);
      return item;
    }));
    choose(0);
  };
  function openPalette() { if (palette) { text.value = ""; draw(); palette.showModal(); text.focus(); } }
  text?.addEventListener("input", () => draw());
  text?.addEventListener("keydown", (event) => {
    const all = $$("a", hits), at = all.findIndex((link) => link.classList.contains("on"));
    if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); choose((at + (event.key === "ArrowDown" ? 1 : -1) + all.length) % all.length); }
    if (event.key === "Enter") { event.preventDefault(); all[at]?.click(); }
  });

  if (zone() !== "UTC") named(zone());
  dress(document);
  follow();
  $("#here")?.scrollIntoView({ block: "center" });
})();
