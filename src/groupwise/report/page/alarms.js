// Alarms: what was observed, at which steps, and what to try.

import { h, fill } from "./dom.js";
import { plural } from "./format.js";
import { get, of } from "./source.js";

export async function alarms(root, app) {
  async function show() {
    const runs = app.chosen();
    const responses = await Promise.all(runs.map((run) => get(of(run.id, "/alarms"), { fresh: true })));
    fill(root, runs.map((run, i) => section(run, responses[i], app, runs.length > 1)));
  }
  await show();
  return { refresh: show };
}

function section(run, { alarms, watched, steps }, app, named) {
  const active = alarms.filter((alarm) => alarm.active).length;
  const summary = !steps
    ? "No steps yet."
    : alarms.length === 0
      ? `No alarms in ${plural(steps, "step")}.`
      : `${plural(alarms.length, "alarm")} in ${plural(steps, "step")}, ${active || "none"} still active.`;
  return h(
    "section",
    {},
    named && h("h2", {}, run.name),
    h("p", { class: "verdict", role: "status" }, summary),
    alarms.map((alarm) => card(run, alarm, app)),
    h(
      "details",
      { class: "more" },
      h("summary", {}, `All rules (${watched.length})`),
      h("ul", { class: "watched" }, watched.map((title) => h("li", {}, title))),
    ),
  );
}

function card(run, alarm, app) {
  const when = alarm.first === alarm.last ? `at step ${alarm.first}` : `steps ${alarm.first} – ${alarm.last}`;
  const step = nearest(run.steps, alarm.last);
  return h(
    "article",
    { class: `alarm ${alarm.active ? "active" : "past"}` },
    h(
      "h3",
      {},
      h("span", { class: "mark", "aria-hidden": "true" }, alarm.active ? "▲" : "△"),
      alarm.title,
      h("span", { class: "quiet when" }, `${when} · ${alarm.active ? "active" : "resolved"}`),
    ),
    h("p", {}, alarm.saw),
    h("p", { class: "advice" }, h("b", {}, "Try: "), alarm.advice),
    h(
      "p",
      { class: "links" },
      step !== null && h("a", { href: app.address({ view: "groups", run: run.id, step, group: null, member: null }) }, `Groups of step ${step}`),
      h("span", { class: "quiet" }, ` metric ${alarm.metric}`),
    ),
  );
}

function nearest(steps, step) {
  let best = null;
  for (const one of steps) if (best === null || Math.abs(one - step) < Math.abs(best - step)) best = one;
  return best;
}
