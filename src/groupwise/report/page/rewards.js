// Rewards: their distribution over steps, and over the groups of a step.

import { h, fill, css, debounce } from "./dom.js";
import { fromDifference, number, percent, plural } from "./format.js";
import { get, of, carries } from "./source.js";
import { alpha, chart } from "./chart.js";

export async function rewards(root, app) {
  const run = app.run();
  let heatmapChart = null;
  let step = app.route.step ? Number(app.route.step) : null;
  const top = h("div");
  const bottom = h("section");

  async function distribution() {
    const data = await get(of(run.id, "/distribution"), { fresh: true });
    heatmapChart?.leave();
    if (!data.steps.length) {
      fill(top, h("p", { class: "quiet" }, "No rollouts stored yet."));
      return;
    }
    const few = data.bins.length <= FEW && data.bins.every(([low, high]) => low === high);
    heatmapChart = few ? bars(data, choose) : heatmap(data, choose);
    const note = data.of > data.steps.length ? ` Shown: ${data.steps.length} of ${data.of} steps.` : "";
    const meaning = few ? "Each bar is a step; its parts are the shares of answers with each reward." : "The stronger the colour, the more answers of the step got that reward.";
    fill(top, heatmapChart.card, h("p", { class: "quiet note" }, `${meaning} ${TOUCH ? "Tap" : "Click"} a step to see its groups.${note}`));
    heatmapChart.draw();
  }

  function choose(next) {
    step = next;
    app.go({ step }, { quietly: true });
    groups();
  }

  const chooseLater = debounce(choose, 60);

  async function groups() {
    const steps = run.steps.filter((one) => carries(of(run.id, `/steps/${one}`)));
    if (!steps.length) return fill(bottom);
    const shown = nearest(steps, step ?? steps.at(-1));
    const list = await get(of(run.id, `/steps/${shown}`));
    const prompts = fromDifference(list.map((one) => one.prompt));
    const rows = list.map((one, i) => measure({ ...one, prompt: prompts[i] })).sort((a, b) => b.mean - a.mean || a.group - b.group);
    const low = Math.min(...rows.flatMap((row) => row.values));
    const high = Math.max(...rows.flatMap((row) => row.values));
    const slider = h("input", {
      type: "range", min: 0, max: steps.length - 1, value: steps.indexOf(shown), "aria-label": "Step",
      "aria-valuetext": `step ${shown}`,
      oninput: (event) => chooseLater(steps[Number(event.target.value)]),
    });
    const focused = bottom.contains(document.activeElement) && document.activeElement.type === "range";
    fill(
      bottom,
      h("h2", {}, `Step ${shown}, group by group`),
      h("div", { class: "controls" }, slider, h("span", { class: "quiet" }, `${plural(rows.length, "group")}, best first; each dot is a reward, sized by the number of members that got it`)),
      h("ol", { class: "strips" }, rows.map((row) => strip(row, { low, high, run, step: shown, app }))),
    );
    if (focused) bottom.querySelector("input").focus();
  }

  fill(root, h("h2", {}, "Reward distribution"), top, bottom);

  return {
    async shown() {
      await Promise.all([distribution(), groups()]);
    },
    async refresh() {
      await distribution();
      if (step === null) await groups();
    },
    key(event) {
      const steps = run.steps;
      const at = steps.indexOf(nearest(steps, step ?? steps.at(-1)));
      if (event.key === "[" && at > 0) return choose(steps[at - 1]), true;
      if (event.key === "]" && at < steps.length - 1) return choose(steps[at + 1]), true;
      return false;
    },
    leave: () => heatmapChart?.leave(),
  };
}

export function nearest(steps, step) {
  return steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), steps[0]);
}

// Up to this number of distinct rewards, a step is a bar of shares instead of a column of a heat map.
const FEW = 7;
const TOUCH = matchMedia("(hover: none)").matches;

const half = (steps, s) => (steps.length > 1 ? (steps[Math.min(Math.max(s, 0) + 1, steps.length - 1)] - steps[Math.min(Math.max(s, 0), steps.length - 2)]) / 2 : 0.5);
const aroundSteps = (steps) => (_, a, b) => (a === b ? [a - 1, b + 1] : [a - half(steps, 0), b + half(steps, steps.length - 2)]);

const chooseOnClick = (choose) => (plot) => {
  plot.over.addEventListener("click", () => {
    const index = plot.cursor.idx;
    if (index !== null && index !== undefined) choose(plot.data[0][index]);
  });
};

function bars(data, choose) {
  const { steps, bins, counts } = data;
  const totals = steps.map((_, s) => counts.reduce((sum, row) => sum + row[s], 0));
  const shares = counts.map((row) => row.map((count, s) => count / (totals[s] || 1)));
  const colour = (b) => css(`--series-${(b % 7) + 1}`);
  const label = (value) => `reward ${number(value)}`;

  const drawBars = (plot) => {
    const draw = plot.ctx;
    const shown = new Set(plot.series.map((one) => one.label)); // the legend hides some
    draw.save();
    draw.beginPath();
    draw.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    draw.clip();
    steps.forEach((step, s) => {
      const left = plot.valToPos(step - 0.84 * half(steps, s - 1), "x", true);
      const right = plot.valToPos(step + 0.84 * half(steps, s), "x", true);
      let below = 0;
      bins.forEach(([value], b) => {
        if (!shown.has(label(value))) return;
        const top = plot.valToPos(below + shares[b][s], "y", true);
        draw.fillStyle = colour(b);
        draw.fillRect(left, top, Math.max(right - left, 1), plot.valToPos(below, "y", true) - top);
        below += shares[b][s];
      });
    });
    draw.restore();
  };

  return chart(
    "Rewards by step",
    bins.map(([value], b) => ({ label: label(value), steps, values: shares[b], colour: colour(b), unseen: true })),
    {
      height: 260,
      wide: true,
      format: (value) => percent(value),
      tick: (value) => percent(value, 0),
      xRange: aroundSteps(steps),
      range: () => [0, 1],
      hooks: { drawAxes: [drawBars], ready: [chooseOnClick(choose)] },
    },
  );
}

function heatmap(data, choose) {
  const { steps, bins, counts, mean, quantiles } = data;
  const low = bins[0][0];
  const high = bins.at(-1)[1];
  const span = high - low || 1;
  const gap = bins.length > 1 ? span / (bins.length - 1) : 1;
  const totals = steps.map((_, s) => counts.reduce((sum, row) => sum + row[s], 0));
  const discrete = bins.every(([a, b]) => a === b);
  const edges = (bin) => (discrete ? [bin[0] - gap * 0.38, bin[0] + gap * 0.38] : bin);

  const cells = (plot) => {
    const draw = plot.ctx;
    const colour = css("--series-1");
    draw.save();
    draw.beginPath();
    draw.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    draw.clip();
    steps.forEach((step, s) => {
      const left = plot.valToPos(step - half(steps, s - 1), "x", true);
      const right = plot.valToPos(step + half(steps, s === steps.length - 1 ? s - 1 : s), "x", true);
      bins.forEach((bin, b) => {
        const share = counts[b][s] / (totals[s] || 1);
        if (!share) return;
        const [from, to] = edges(bin);
        const y = plot.valToPos(to, "y", true);
        draw.fillStyle = alpha(colour, 0.06 + 0.84 * Math.sqrt(share));
        draw.fillRect(left, y, Math.max(right - left - (right - left > 6 ? 1 : 0), 1), plot.valToPos(from, "y", true) - y);
      });
    });
    draw.restore();
  };
  return chart(
    "Rewards by step",
    [
      { label: "mean", steps, values: mean, colour: css("--series-2") },
      { label: "median", steps, values: quantiles["0.5"], colour: css("--ink"), dash: [3, 3] },
    ],
    {
      height: 260,
      wide: true,
      xRange: aroundSteps(steps),
      range: () => [low - gap * 0.5, high + gap * 0.5],
      hooks: { drawAxes: [cells], ready: [chooseOnClick(choose)] },
    },
  );
}

function measure(group) {
  const values = group.members.filter((member) => member.error === null).map((member) => member.reward);
  const mean = values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0;
  return { ...group, values, mean };
}

function strip(row, { low, high, run, step, app }) {
  const counted = new Map();
  for (const value of row.values) counted.set(value, (counted.get(value) ?? 0) + 1);
  const position = (value) => (high > low ? (100 * (value - low)) / (high - low) : 50);
  const failed = row.members.length - row.values.length;
  const words = [...counted].sort((a, b) => b[0] - a[0]).map(([value, count]) => `${count} × ${number(value)}`).join(", ");
  return h(
    "li",
    {},
    h(
      "a",
      { href: app.address({ view: "groups", run: run.id, step, group: row.group, member: null }), "aria-label": `group ${row.group}: ${words}${failed ? `, ${failed} failed` : ""}. ${row.prompt}` },
      h("span", { class: "strip-prompt" }, row.prompt),
      h(
        "span",
        { class: "strip", "aria-hidden": "true" },
        [...counted].map(([value, count]) =>
          h("span", { class: "blob", title: `${count} × ${number(value)}`, style: { left: `${position(value)}%`, width: `${6 + 3.2 * Math.sqrt(count)}px`, height: `${6 + 3.2 * Math.sqrt(count)}px` } }),
        ),
      ),
      h("span", { class: "strip-mean" }, number(row.mean), failed > 0 && h("span", { class: "quiet" }, ` ${failed} failed`)),
    ),
  );
}
