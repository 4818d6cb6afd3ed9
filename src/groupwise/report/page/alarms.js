// Alarms: what looked wrong, when, and what to try.

import { h, fill } from "./dom.js";
import { plural } from "./format.js";
import { get, of } from "./source.js";

export async function alarms(root, app) {
  async function show() {
    const runs = app.chosen();
    const found = await Promise.all(runs.map((run) => get(of(run.id, "/alarms"), { again: true })));
    fill(root, runs.map((run, i) => section(run, found[i], app, runs.length > 1)));
  }
  await show();
  return { refresh: show };
}

function section(run, { alarms, watched, steps }, app, named) {
  const active = alarms.filter((alarm) => alarm.active).length;
  const words = !steps
    ? "No step has been made yet."
    : alarms.length === 0
      ? `Nothing looked wrong in ${plural(steps, "step")}.`
      : `${plural(alarms.length, "alarm")} in ${plural(steps, "step")}, ${active ? `${active} of them still true` : "none of them still true"}.`;
  return h(
    "section",
    {},
    named && h("h2", {}, run.name),
    h("p", { class: "verdict", role: "status" }, words),
    alarms.map((alarm) => card(run, alarm, app)),
    h(
      "details",
      { class: "more" },
      h("summary", {}, `What is watched (${watched.length})`),
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
      h("span", { class: "quiet when" }, `${when} · ${alarm.active ? "still true" : "over"}`),
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
  let found = null;
  for (const one of steps) if (found === null || Math.abs(one - step) < Math.abs(found - step)) found = one;
  return found;
}
