// Charts of uPlot: drag to zoom into a span, double click to go back. The page has each as a table, too.
"use strict";
window.logweirCharts = (root) => {
  const styles = getComputedStyle(document.documentElement);
  const color = (name) => styles.getPropertyValue(name).trim();
  for (const place of root.querySelectorAll("[data-chart]")) {
    const values = place.dataset.chart.split(",").map(Number);
    const begin = Number(place.dataset.begin), end = Number(place.dataset.end);
    const step = (end - begin) / Math.max(1, values.length);
    const band = (place.dataset.high || "").split(",").filter(Boolean).map(Number);
    const floor = (place.dataset.low || "").split(",").filter(Boolean).map(Number);
    const edge = { stroke: color("--soft"), width: 1, dash: [4, 4], points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) };
    const zone = window.logweirZone();
    // As the pages write times: 24 hours, and the day before the month.
    const clock = (chart, splits, axis, space, step) => splits.map((at, n) => {
      const moment = new Date(at * 1e3), day = moment.toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: zone });
      const before = n && new Date(splits[n - 1] * 1e3).toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: zone });
      if (step >= 86400) return day;
      const hour = moment.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}), timeZone: zone });
      return day === before ? hour : `${hour}\n${day}`;
    });
    const times = values.map((_, at) => begin + at * step);
    const zoom = (chart) => {
      const { left, width } = chart.select;
      if (width < 6) return;
      const address = new URL(location.href);
      address.searchParams.set("since", new Date(chart.posToVal(left, "x") * 1000).toISOString());
      address.searchParams.set("until", new Date(chart.posToVal(left + width, "x") * 1000).toISOString());
      location.assign(address);
    };
    place.replaceChildren();
    const chart = new uPlot({
      width: place.clientWidth || 600, height: 170, legend: { show: false },
      cursor: { drag: { setScale: false, x: true, y: false } },
      scales: { x: { time: true } }, hooks: { setSelect: [zoom] },
      axes: [
        { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") }, values: clock, space: 70 },
        { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") }, size: 60 },
      ],
      tzDate: (at) => uPlot.tzDate(new Date(at * 1e3), zone === "UTC" ? "Etc/UTC" : zone),
      series: [{}, { label: place.dataset.label, stroke: color("--accent"), fill: color("--blue-bg"), paths: uPlot.paths.bars({ size: [0.9, 60] }), points: { show: false } },
        ...(band.length ? [{ ...edge, label: "usual at most" }, { ...edge, label: "usual at least" }] : [])],
      bands: band.length ? [{ series: [2, 3], fill: color("--line") + "80" }] : [],
    }, band.length ? [times, values, band, floor] : [times, values], place);
    place.ondblclick = () => history.back();
    new ResizeObserver(() => chart.setSize({ width: place.clientWidth || 600, height: 170 })).observe(place);
  }
};
