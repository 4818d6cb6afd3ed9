// Curves: charts of learning progress, training health, answers and speed.

import { h, fill, css } from "./dom.js";
import { number, percent } from "./format.js";
import { get, of } from "./source.js";
import { chart } from "./chart.js";

const share = (value) => percent(value, Math.abs(value) < 0.1 && value !== 0 ? 1 : 0);
const shareTick = (value) => percent(value, value !== 0 && Math.abs(value) < 0.05 ? 1 : 0);
const seconds = (value) => `${number(value)} s`;
const nats = (value) => number(value);
const points = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${Math.abs(100 * value).toFixed(1)}`; // likewise
const reward = (value) => value.toFixed(3); // as the terminal shows it

// Sections of charts: title, metrics with their labels, and value formats.
const CHARTS = {
  "Learning": [
    { title: "Held-out accuracy", evaluations: true, format: (v) => percent(v), tick: (v) => percent(v, 0), wide: true },
    { title: "Reward", metrics: [["reward/mean", "mean of all answers"]], wide: true, format: reward },
    { title: "Reward by part", parts: true, format: reward },
    { title: "Held-out reward", heldOutReward: true, format: reward, about: "Mean reward of sampled answers to held-out prompts" },
    { title: "Groups without signal", metrics: [["advantage/zero_variance", "share of groups"]], format: share, tick: shareTick, about: "Share of groups whose answers all got the same reward; they give no gradient" },
  ],
  "Population": [
    { title: "Held-out accuracy of each member", member: "accuracy", format: (v) => percent(v), tick: (v) => percent(v, 0), about: "On the prompts that select, by slot of the population" },
    { title: "Reward of each member", member: "reward/mean", format: reward, about: "Mean reward of all answers, by slot of the population" },
    { title: "KL of each member", member: "policy/kl", format: nats },
    { title: "Length of each member", member: "rollout/length" },
  ],
  "Health": [
    { title: "Entropy", metrics: [["policy/entropy", "nats per token"]], format: nats },
    { title: "KL", metrics: [["policy/kl", "from the reference"], ["policy/kl_old", "from the sampling policy"]], format: nats },
    { title: "Clipped tokens", metrics: [["policy/clip_low", "below"], ["policy/clip_high", "above"]], format: share, tick: shareTick, about: "Share of tokens whose ratio was clipped" },
    { title: "Sampler–trainer gap", metrics: [["policy/gap", "mean |Δ log-prob|"]], format: nats },
    { title: "Gradient norm", metrics: [["policy/grad_norm", "before clipping"]] },
    { title: "Loss", metrics: [["policy/loss", "mean over updates"]] },
  ],
  "Answers": [
    { title: "Length", metrics: [["rollout/length", "mean tokens"], ["rollout/length_max", "longest"]] },
    { title: "Failures", metrics: [["rollout/truncated", "truncated"], ["rollout/looping", "looping"], ["rollout/failed", "not scored"]], format: share, tick: shareTick },
    { title: "Identical answers", metrics: [["rollout/repeated", "within a group"], ["rollout/same_answer", "across prompts"]], format: share, tick: shareTick },
  ],
  "Speed": [
    { title: "Tokens per second", metrics: [["speed/tokens_per_second", "whole step"], ["speed/rollout_tokens_per_second", "rollout"]] },
    { title: "Time per step", metrics: [["time/rollout", "rollout"], ["time/reward", "rewards"], ["time/update", "update"]], stacked: true, format: seconds },
    { title: "Peak memory", metrics: [["memory/peak_gb", "GB, maximum so far"]] },
  ],
};

const settings = { smoothing: 0, log: false };

export async function curves(root, app) {
  const data = new Map();
  for (const run of app.chosen()) data.set(run.id, await get(of(run.id, "/curves"), { fresh: true }));

  const head = h("section", { class: "headline", "aria-label": "Summary" });
  const body = h("div");
  const population = h("div");
  let charts = [];
  const waiting = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      waiting.unobserve(entry.target);
      charts.find((one) => one.card === entry.target)?.draw();
    }
  }, { rootMargin: "300px" });

  function build() {
    for (const one of charts) one.leave();
    charts = [];
    const known = new Set();
    const sections = Object.entries(CHARTS).map(([name, specs]) => {
      const cards = specs.map((spec) => make(spec, known)).filter(Boolean);
      return cards.length ? h("section", {}, h("h2", {}, name), h("div", { class: "cards" }, cards)) : null;
    });
    const rest = [...new Set([...data.values()].flatMap((one) => Object.keys(one.values)))]
      .filter((name) => !known.has(name) && !name.startsWith("eval/"))
      .sort();
    const more = h("details", { class: "more" }, h("summary", {}, `All other metrics (${rest.length})`));
    more.addEventListener("toggle", () => {
      if (!more.open || more.querySelector(".cards")) return;
      more.append(h("div", { class: "cards" }, rest.map((name) => make({ title: name, metrics: [[name, name]] }, known))));
    });
    const empty = charts.length === 0 && h("p", { class: "quiet" }, "No steps yet.");
    fill(body, empty, sections, rest.length ? more : null);
  }

  function make(spec, known) {
    for (const [name] of names(spec)) known.add(name);
    const lines = linesOf(spec);
    if (!lines.length) return null;
    const one = chart(spec.title, lines, {
      ...spec,
      ...settings,
      sync: "steps",
    });
    one.spec = spec;
    charts.push(one);
    waiting.observe(one.card);
    return one.card;
  }

  const names = (spec) => (spec.parts ? parts() : spec.member ? slots(spec.member) : spec.metrics ?? []);

  function slots(metric) {
    const metrics = new Set([...data.values()].flatMap((one) => Object.keys(one.values)));
    return [...metrics]
      .map((name) => [name, name.match(/^member\/(\d+)\/(.*)$/)])
      .filter(([, found]) => found?.[2] === metric)
      .sort(([, a], [, b]) => Number(a[1]) - Number(b[1]))
      .map(([name, found]) => [name, `slot ${found[1]}`]);
  }

  function parts() {
    const metrics = new Set([...data.values()].flatMap((one) => Object.keys(one.values)));
    return [...metrics]
      .filter((name) => /^reward\/.+\/mean$/.test(name))
      .map((name) => [name, name.slice("reward/".length, -"/mean".length)]);
  }

  function linesOf(spec) {
    const runs = app.chosen().filter((run) => data.has(run.id));
    const single = runs.length === 1;
    const lines = [];
    for (const run of runs) {
      const one = data.get(run.id);
      const list = spec.evaluations ? scores(one) : spec.heldOutReward ? heldOutReward(one) : names(spec).filter(([name]) => hasValues(one.values[name]));
      list.forEach(([name, label, ready], index) => {
        lines.push({
          label: single ? label : list.length > 1 ? `${run.name} · ${label}` : run.name,
          colour: single ? css(`--series-${(index % 7) + 1}`) : app.colour(run),
          dash: single || index === 0 ? null : [[5, 4], [2, 3], [8, 3, 2, 3]][(index - 1) % 3],
          stacked: spec.stacked && single,
          ...(ready ?? { steps: one.step, values: one.values[name] }),
          // With several runs, draw the bands of the first score only.
          ...(single || index === 0 ? {} : { band: null }),
        });
      });
    }
    return lines;
  }

  function headline() {
    fill(head, app.chosen().filter((run) => data.has(run.id)).map((run) => summaryOf(run, data.get(run.id), app)));
  }

  async function drawPopulation() {
    const searches = app.chosen().filter((run) => run.search);
    const tables = await Promise.all(searches.map(async (run) => membersOf(run, await get(of(run.id, "/population"), { fresh: true }))));
    fill(population, tables);
  }

  const smoothing = h("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smoothing, id: "smoothing",
    oninput: (event) => {
      settings.smoothing = Number(event.target.value);
      rebuild();
    },
  });
  const log = h("input", {
    type: "checkbox", id: "log", checked: settings.log,
    onchange: (event) => {
      settings.log = event.target.checked;
      rebuild();
    },
  });

  function rebuild() {
    const scroll = window.scrollY;
    const open = body.querySelector("details.more")?.open;
    build();
    if (open) body.querySelector("details.more").open = true;
    window.scrollTo(0, scroll);
  }

  fill(
    root,
    head,
    h(
      "div",
      { class: "controls" },
      h("label", { for: "smoothing" }, "Smoothing"), smoothing,
      h("label", { for: "log" }, log, " Log scale"),
      h("span", { class: "quiet hint" }, "drag to zoom, double-click to reset"),
      h("span", { class: "quiet touch" }, "tap a chart for its values, a name to hide its line"),
    ),
    population,
    body,
    app.chosen().map((run) => settingsOf(run, app.chosen().length > 1)),
  );
  headline();
  build();
  await drawPopulation();

  // Charts are drawn when they scroll into view; printing needs all of them.
  const drawAll = () => {
    for (const one of charts) {
      waiting.unobserve(one.card);
      one.draw();
    }
  };
  window.addEventListener("beforeprint", drawAll);
  // Then the rest, so that a screenshot of the whole page shows every chart.
  const rest = setTimeout(drawAll, 1200);

  return {
    async refresh(run) {
      const old = data.get(run.id);
      const lastStep = old?.step.at(-1) ?? -1;
      const fresh = await get(of(run.id, run.step >= lastStep ? `/curves?after=${lastStep}` : "/curves"), { fresh: true });
      data.set(run.id, run.step >= lastStep && old ? joined(old, fresh) : fresh);
      headline();
      await drawPopulation();
      for (const one of charts) one.update(linesOf(one.spec));
      if (charts.length === 0) build();
    },
    leave() {
      window.removeEventListener("beforeprint", drawAll);
      clearTimeout(rest);
      waiting.disconnect();
      for (const one of charts) one.leave();
    },
  };
}

// The members of a search: the values that differ, accuracy with its interval, and what became of each.

function membersOf(run, search) {
  const values = [...new Set(search.members.flatMap((member) => Object.keys(member.values)))];
  const last = new Map(search.events.map((event) => [event.name, event]));
  const fitness = (member) => (member.fitness ? `${percent(member.fitness[0])} [${percent(member.fitness[1])}, ${percent(member.fitness[2])}]` : "–");
  const row = (member) => {
    const event = last.get(member.name);
    return h(
      "tr",
      { class: member.trouble ? "failed" : null },
      h("th", { scope: "row" }, member.name, search.best?.name === member.name && h("span", { class: "quiet" }, " best")),
      h("td", {}, member.place),
      h("td", {}, member.parent ?? "base"),
      values.map((name) => h("td", {}, number(member.values[name]))),
      h("td", {}, fitness(member)),
      h("td", {}, member.trouble ?? (event ? `${event.what} after step ${event.step}: ${event.detail}` : "")),
    );
  };
  return h(
    "section",
    { class: "population", "aria-label": `Members of ${run.name}` },
    h("h2", {}, "Members"),
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ["member", "slot", "parent", ...values, "accuracy", "last event"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, search.members.map(row)),
      ),
    ),
  );
}

function settingsOf(run, named) {
  const text = h("pre", { class: "settings" });
  const fold = h("details", { class: "more" }, h("summary", {}, named ? `Settings of ${run.name}` : "Settings"), text);
  fold.addEventListener("toggle", async () => {
    if (fold.open && !text.textContent) text.textContent = (await get(of(run.id, "/settings"))).text;
  });
  return fold;
}

const hasValues = (values) => values !== undefined && values.some((value) => value !== null);

function joined(old, fresh) {
  const names = new Set([...Object.keys(old.values), ...Object.keys(fresh.values)]);
  const empty = (count) => new Array(count).fill(null);
  const values = {};
  for (const name of names) {
    values[name] = [...(old.values[name] ?? empty(old.step.length)), ...(fresh.values[name] ?? empty(fresh.step.length))];
  }
  return { step: [...old.step, ...fresh.step], values, evaluations: fresh.evaluations };
}

function scores(one) {
  const names = [...new Set(one.evaluations.flatMap((each) => Object.keys(each.scores)))];
  return names.map((name) => {
    const having = one.evaluations.filter((each) => name in each.scores);
    const column = (index) => having.map((each) => each.scores[name][index]);
    return [name, name, { steps: having.map((each) => each.step), values: column(0), band: { low: column(1), high: column(2) } }];
  });
}

function heldOutReward(one) {
  const having = one.evaluations.filter((each) => each.reward);
  const column = (index) => having.map((each) => each.reward[index]);
  if (!having.length) return [];
  return [["reward", "sampled answers", { steps: having.map((each) => each.step), values: column(0), band: { low: column(1), high: column(2) } }]];
}

// The key figures of a run

function summaryOf(run, one, app) {
  const first = one.evaluations[0];
  const final = one.evaluations.at(-1);
  const several = app.chosen().length > 1;
  const figures = [];
  for (const name of Object.keys(final?.scores ?? {})) {
    const [value, low, high] = final.scores[name];
    const before = first !== final ? first.scores[name]?.[0] : undefined;
    figures.push(figure(name, percent(value), `95 % interval ${percent(low)} – ${percent(high)}`, before === undefined ? "" : `${points(value - before)} points since the first evaluation`));
  }
  if (final?.reward) {
    const [value, low, high] = final.reward;
    const before = first !== final ? first.reward?.[0] : undefined;
    figures.push(figure("held-out reward", reward(value), `95 % interval ${reward(low)} – ${reward(high)}`, before === undefined ? "" : `${reward(before)} at the first evaluation`));
  }
  const trained = one.values["reward/mean"];
  if (hasValues(trained)) {
    const known = trained.filter((value) => value !== null);
    figures.push(figure("reward", reward(known.at(-1)), "", `${reward(known[0])} at the first step`));
  }
  return h(
    "div",
    { class: "short" },
    several && h("h2", {}, h("span", { class: "dot", style: { background: app.colour(run) } }), run.name),
    !several && h("p", { class: "quiet about" }, run.title),
    h("div", { class: "figures" }, figures),
  );
}

const HINTS = [
  [/^greedy$/, "Share of held-out prompts whose greedy answer is correct"],
  [/^avg@/, "Mean share of k sampled answers that are correct"],
  [/^maj@/, "Share of held-out prompts where the majority answer of k samples is correct"],
  [/^pass@/, "Share of held-out prompts where at least one of k samples is correct"],
  [/^format$/, "Mean share of k sampled answers in the requested format"],
  [/^reward$/, "Mean reward of the last step"],
  [/^held-out reward$/, "Mean reward of sampled answers to held-out prompts, at the last evaluation"],
];

const figure = (name, value, interval, change) =>
  h(
    "div",
    { class: "figure", title: HINTS.find(([pattern]) => pattern.test(name))?.[1] },
    h("span", { class: "quiet" }, name),
    h("b", {}, value),
    interval && h("span", { class: "quiet", title: "95 % interval" }, interval),
    change && h("span", { class: "change" }, change),
  );
