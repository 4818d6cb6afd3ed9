// A chart: lines over steps with bands, values on hover, zoom by dragging, and downloads.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { h, fill, css, save } from "./dom.js";
import { number, tick } from "./format.js";

// A line: { label, steps, values, colour, dash, band: { low, high }, stacked, unseen (its values are drawn otherwise) }

export function chart(title, lines, options = {}) {
  const format = options.format ?? number;
  const box = h("div", { class: "plot" });
  const legend = h("div", { class: "legend" });
  const card = h(
    "figure",
    { class: `card ${options.wide ? "wide" : ""}` },
    h(
      "figcaption",
      {},
      h("span", { class: "title", title: options.about ?? title }, title),
      h(
        "span",
        { class: "tools" },
        h("button", { class: "plain", onclick: () => downloadCsv(title, lines) , "aria-label": `${title} as CSV` }, "CSV"),
        h("button", { class: "plain", onclick: () => downloadPng(title, plot, lines), "aria-label": `${title} as PNG` }, "PNG"),
      ),
    ),
    box,
    legend,
  );
  let plot = null;
  let hovered = null;
  const hidden = new Set();

  function draw() {
    const width = Math.max(box.clientWidth, 200);
    const prepared = prepare(visible(), options);
    plot?.destroy();
    plot = new uPlot(settings(prepared, { ...options, format, width, onhover }), prepared.data, box);
    plot.root.setAttribute("role", "img");
    plot.root.setAttribute("aria-label", summary(title, lines, format));
    showValues(null);
  }

  // Draw the band of the first visible line only: overlapping bands cannot be distinguished.
  function visible() {
    const shown = lines.filter((line) => !hidden.has(line.label));
    const first = shown.find((line) => line.band);
    return shown.map((line) => (line.band && line !== first ? { ...line, band: null, thin: true } : line));
  }

  function toggle(label, index) {
    if (hidden.has(label)) hidden.delete(label);
    else hidden.add(label);
    if (plot) draw();
    legend.querySelectorAll("button")[index]?.focus();
  }

  function onhover(index, step) {
    hovered = index === null || index === undefined ? null : step;
    showValues(hovered);
  }

  function showValues(step) {
    fill(
      legend,
      h("span", { class: "at quiet" }, step === null ? "latest" : `step ${step}`),
      lines.map((line, index) => {
        const at = step === null ? last(line) : valueAt(line, step);
        const band = at?.band ? ` [${format(at.band[0])}, ${format(at.band[1])}]` : "";
        return h(
          "button",
          {
            class: "entry",
            "aria-pressed": hidden.has(line.label) ? "false" : "true",
            title: hidden.has(line.label) ? "Show this line" : "Hide this line",
            onclick: () => toggle(line.label, index),
          },
          swatch(line),
          h("span", { class: "quiet" }, line.label),
          h("b", {}, at ? format(at.value) : "–"),
          band && h("span", { class: "quiet" }, band),
        );
      }),
    );
  }

  showValues(null); // gives the card its height before it is drawn, so that nothing below it moves

  const resize = new ResizeObserver(() => {
    if (plot && Math.abs(plot.width - box.clientWidth) > 1) plot.setSize({ width: box.clientWidth, height: plot.height });
  });

  return {
    card,
    draw() {
      draw();
      resize.observe(box);
    },
    update(next) {
      lines = next;
      if (!plot) return;
      const zoom = zoomed(plot);
      draw();
      if (zoom) plot.setScale("x", zoom);
    },
    leave() {
      resize.disconnect();
      plot?.destroy();
      plot = null;
    },
  };
}

function zoomed(plot) {
  const { min, max } = plot.scales.x;
  const steps = plot.data[0];
  return steps.length && (min > steps[0] || max < steps[steps.length - 1]) ? { min, max } : null;
}

function swatch(line) {
  return h("span", {
    class: `swatch ${line.dash ? "dashed" : ""}`,
    style: { borderTopColor: line.colour, borderTopStyle: line.dash ? "dashed" : "solid" },
  });
}

function last(line) {
  for (let i = line.values.length - 1; i >= 0; i--) if (line.values[i] !== null) return at(line, i);
  return null;
}

function valueAt(line, step) {
  const i = line.steps.indexOf(step);
  return i < 0 || line.values[i] === null ? null : at(line, i);
}

const at = (line, i) => ({
  step: line.steps[i],
  value: line.values[i],
  band: line.band && line.band.low[i] !== null ? [line.band.low[i], line.band.high[i]] : null,
});

function summary(title, lines, format) {
  const parts = lines.map((line) => {
    const first = line.values.findIndex((value) => value !== null);
    const end = last(line);
    if (first < 0) return `${line.label}: no values`;
    return `${line.label}: from ${format(line.values[first])} at step ${line.steps[first]} to ${format(end.value)} at step ${end.step}`;
  });
  return `${title}. ${parts.join("; ")}`;
}

// Smoothing: a bias-corrected exponential moving average

export function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// Join the lines of several runs on one step axis

function prepare(lines, options) {
  const log = options.log && lines.every((line) => !line.stacked);
  const safe = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
  const tables = [];
  const series = [{ label: "step" }];
  const bands = [];
  let base = null;
  for (const line of lines) {
    let values = line.values;
    if (line.stacked) {
      values = values.map((value, i) => (value ?? 0) + (base?.[i] ?? 0));
      base = values;
    }
    const columns = [line.steps];
    if (line.band) {
      columns.push(safe(line.band.high), safe(line.band.low));
      bands.push({ series: [series.length, series.length + 1], fill: alpha(line.colour, 0.16) });
      series.push({ stroke: "transparent", spanGaps: true, points: { show: false } });
      series.push({ stroke: "transparent", spanGaps: true, points: { show: false } });
    }
    const weight = line.band || line.stacked ? 0 : options.smoothing ?? 0;
    if (weight) {
      columns.push(safe(values));
      series.push({ stroke: alpha(line.colour, 0.25), width: 1, points: { show: false }, spanGaps: true });
    }
    columns.push(safe(smooth(values, weight)));
    series.push({
      label: line.label,
      stroke: line.unseen ? "transparent" : line.colour,
      width: line.thin ? 1 : 1.75,
      dash: line.dash ?? undefined,
      spanGaps: true,
      points: { show: !line.unseen && line.steps.length <= 40, size: 5, fill: line.colour, stroke: css("--surface") },
      fill: line.stacked ? alpha(line.colour, 0.35) : undefined,
    });
    if (line.stacked && series.length > 2) bands.push({ series: [series.length - 1, series.length - 2], fill: alpha(line.colour, 0.35) });
    tables.push(columns);
  }
  for (const one of series) if (bands.some((band) => band.series[0] === series.indexOf(one))) one.fill = undefined;
  const data = tables.length ? uPlot.join(tables) : [[]];
  return { data, series, bands, log };
}

function settings(prepared, options) {
  const axis = {
    stroke: css("--muted"),
    grid: { stroke: css("--grid"), width: 1 },
    ticks: { show: false },
    font: `11px ${css("--sans")}`,
  };
  return {
    width: options.width,
    height: options.height ?? 190,
    padding: [8, 8, 0, 0],
    legend: { show: false },
    cursor: {
      sync: options.sync ? { key: options.sync, scales: ["x", null] } : undefined,
      points: { size: 7 },
      drag: { x: true, y: false, setScale: true },
      focus: { prox: 24 },
    },
    scales: {
      x: { time: false, range: options.xRange ?? ((_, a, b) => (a === b ? [a - 1, b + 1] : [a, b])) },
      y: {
        distr: prepared.log ? 3 : 1,
        range: prepared.log ? undefined : options.range ?? (options.stacked ? fromZero : niceRange),
      },
    },
    axes: [
      { ...axis, size: 28, space: 60, incrs: WHOLE, values: (_, ticks) => ticks.map((step) => (Number.isInteger(step) ? step.toLocaleString("en") : "")) },
      { ...axis, size: 52, space: 34, values: (_, ticks) => ticks.map((value) => (value === null ? "" : (options.tick ?? tick)(value))) },
    ],
    series: prepared.series,
    bands: prepared.bands,
    hooks: {
      setCursor: [(plot) => options.onhover(plot.cursor.idx, plot.data[0][plot.cursor.idx])],
      ...(options.hooks ?? {}),
    },
  };
}

const WHOLE = [1, 2, 5].flatMap((first) => [0, 1, 2, 3, 4, 5, 6].map((power) => first * 10 ** power)).sort((a, b) => a - b);

const fromZero = (_, low, high) => [0, high ? 1.06 * high : 1];

function niceRange(_, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * high)];
  const pad = 0.06 * (high - low);
  return [low >= 0 && low < 0.4 * high ? 0 : low - pad, high + pad];
}

export function alpha(colour, share) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return `rgba(${r}, ${g}, ${b}, ${share})`;
}

// Downloads

const fileName = (title) => title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");

function downloadCsv(title, lines) {
  const quote = (text) => `"${String(text).replaceAll('"', '""')}"`;
  const columns = [];
  for (const line of lines) {
    columns.push([line.label, line.steps, line.values]);
    if (line.band) columns.push([`${line.label} low`, line.steps, line.band.low], [`${line.label} high`, line.steps, line.band.high]);
  }
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const tables = columns.map(([, own, values]) => new Map(own.map((step, i) => [step, values[i]])));
  const rows = [
    ["step", ...columns.map(([label]) => quote(label))],
    ...steps.map((step) => [step, ...tables.map((table) => table.get(step) ?? "")]),
  ];
  save(`${fileName(title)}.csv`, new Blob([rows.map((row) => row.join(",")).join("\n") + "\n"], { type: "text/csv" }));
}

function downloadPng(title, plot, lines) {
  if (!plot) return;
  const ratio = devicePixelRatio || 1;
  const source = plot.ctx.canvas;
  const head = 34 * ratio;
  const canvas = h("canvas", { width: source.width, height: source.height + head + 26 * ratio });
  const draw = canvas.getContext("2d");
  draw.fillStyle = css("--surface");
  draw.fillRect(0, 0, canvas.width, canvas.height);
  draw.drawImage(source, 0, head);
  draw.font = `600 ${14 * ratio}px ${css("--sans")}`;
  draw.fillStyle = css("--ink");
  draw.fillText(title, 12 * ratio, 22 * ratio);
  draw.font = `${11 * ratio}px ${css("--sans")}`;
  let left = 12 * ratio;
  for (const line of lines) {
    draw.fillStyle = line.colour;
    draw.fillRect(left, canvas.height - 15 * ratio, 14 * ratio, 3 * ratio);
    draw.fillStyle = css("--muted");
    draw.fillText(line.label, left + 18 * ratio, canvas.height - 10 * ratio);
    left += draw.measureText(line.label).width + 32 * ratio;
  }
  canvas.toBlob((blob) => save(`${fileName(title)}.png`, blob));
}
