// Keeps a page live: elements with `data-live` are replaced by those of the page as it is now, which
// the server has escaped, and charts get the samples behind those that they have.
"use strict";
const POLL_MS = 1000;
const CHART_STEPS_MS = { 1: 2000, 10: 10000, 60: 60000 };
const LENGTHS = { 1: 900, 10: 360, 60: 1440 };
const charts = [...document.querySelectorAll(".chart")].map((figure) => ({
  figure, names: figure.dataset.series.split(","), plot: null,
}));
let step = 1;
let samples = { times: [], series: {} };

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

async function answer(url) {
  const response = await fetch(url, { signal: AbortSignal.timeout(4000) });
  if (!response.ok) throw new Error(`${url}: ${response.status}`);
  return response;
}

async function refresh() {
  try {
    const text = await (await answer(location.href)).text();
    const now = new DOMParser().parseFromString(text, "text/html");
    for (const old of document.querySelectorAll("[data-live]")) {
      const fresh = now.getElementById(old.id);
      const busy = old.contains(document.activeElement) && document.activeElement !== document.body;
      if (fresh && !busy && fresh.innerHTML !== old.innerHTML) {
        old.replaceChildren(...fresh.childNodes);
      }
    }
    document.getElementById("offline").hidden = true;
  } catch {
    document.getElementById("offline").hidden = false;
  }
  setTimeout(refresh, POLL_MS);
}

function shown(value) {
  if (value == null) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${+(value / size).toFixed(2)} ${unit}`;
  }
  return String(+value.toFixed(2));
}

// Times of charts are those of the page's text: UTC, 24 hours a day.
function timeText(time, seconds) {
  return new Date(time * 1000).toISOString().slice(11, seconds ? 19 : 16);
}

function draw(chart) {
  const data = [samples.times, ...chart.names.map((name) => samples.series[name])];
  const place = chart.figure.querySelector(".plot");
  if (chart.plot) {
    chart.plot.setData(data);
    return;
  }
  const strokes = [color("--accent"), color("--critical")];
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 } };
  chart.plot = new uPlot({
    width: place.clientWidth, height: 170, legend: { live: false },
    scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(high ?? 0, 1e-3) * 1.1] } },
    tzDate: (time) => uPlot.tzDate(new Date(time * 1000), "UTC"),
    axes: [{ ...axis, values: (_, times, __, ___, gap) => times.map((time) => timeText(time, gap < 60)) }, { ...axis, size: 62, values: (_, values) => values.map(shown) }],
    series: [{}, ...chart.names.map((name, number) => ({
      label: name.replaceAll("_", " "), stroke: strokes[number], width: 1.5,
      value: (_, value) => shown(value),
    }))],
  }, data, place);
}

async function plot(asked) {
  const names = [...new Set(charts.flatMap((chart) => chart.names))];
  try {
    const since = samples.times.at(-1) ?? 0;
    const got = await (await answer(`/api/series.json?step=${asked}&since=${since}&names=${names}`)).json();
    if (asked !== step) return;
    const joined = (old, fresh) => [...(old ?? []), ...fresh].slice(-LENGTHS[step]);
    samples = {
      times: joined(samples.times, got.times),
      series: Object.fromEntries(names.map((name) => [name, joined(samples.series[name], got.series[name])])),
    };
    charts.forEach(draw);
  } catch { /* the page says that the controller does not answer */ }
  if (asked === step) setTimeout(plot, CHART_STEPS_MS[asked], asked);
}

for (const button of document.querySelectorAll("[data-step]")) {
  button.addEventListener("click", () => {
    step = Number(button.dataset.step);
    samples = { times: [], series: {} };
    for (const each of document.querySelectorAll("[data-step]")) {
      each.setAttribute("aria-pressed", String(each === button));
    }
    plot(step);
  });
}

function redrawn() {
  for (const chart of charts) {
    chart.plot?.destroy();
    chart.plot = null;
    if (samples.times.length) draw(chart);
  }
}
addEventListener("resize", redrawn);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawn);
setTimeout(refresh, POLL_MS);
if (charts.length) plot(step);
