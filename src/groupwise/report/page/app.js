// The frame: which runs, which view, where in it. Everything that is chosen stands in the address.

import { h, fill, later, css } from "./dom.js";
import { plural } from "./format.js";
import { get, of, listen, inReport } from "./source.js";
import { curves } from "./curves.js";
import { rewards } from "./rewards.js";
import { groups } from "./groups.js";
import { tokens } from "./tokens.js";
import { alarms } from "./alarms.js";

const VIEWS = [
  ["curves", "Curves", curves],
  ["rewards", "Rewards", rewards],
  ["groups", "Groups", groups],
  ["tokens", "Tokens", tokens],
  ["alarms", "Alarms", alarms],
];

const KEYS = [
  ["1 – 5", "Curves, Rewards, Groups, Tokens, Alarms"],
  ["j  k", "next and previous group; in Tokens, member"],
  ["[  ]", "previous and next step"],
  ["/", "search"],
  ["← →", "in Tokens, move from token to token"],
  ["c", "in Tokens, colour by the next quantity"],
  ["t", "light, dark, or as the system"],
  ["?", "this help"],
];

const main = document.getElementById("main");
const header = document.getElementById("header");

const app = {
  runs: [],
  alarmCount: {},
  place: {},
  live: null,
  view: null,
};

// The place: #groups?run=a&step=3&group=1

function readPlace() {
  const [view, query = ""] = location.hash.replace(/^#/, "").split("?");
  const place = Object.fromEntries(new URLSearchParams(query));
  place.view = VIEWS.some(([name]) => name === view) ? view : "curves";
  return place;
}

function address(changes) {
  const place = { ...app.place, ...changes };
  const query = new URLSearchParams();
  for (const name of ["run", "with", "step", "group", "member", "by"]) {
    if (place[name] !== undefined && place[name] !== null && place[name] !== "") query.set(name, place[name]);
  }
  return `#${place.view}?${query}`;
}

function go(changes, { quietly = false } = {}) {
  const target = address(changes);
  if (quietly) {
    history.replaceState(null, "", target);
    app.place = readPlace();
  } else if (location.hash !== target) location.hash = target;
  else draw();
}

app.go = go;
app.address = address;

// Runs: the one in focus, and those drawn beside it

app.run = () => app.runs.find((run) => run.id === app.place.run) ?? app.runs[0];

app.chosen = () => {
  const beside = (app.place.with ?? "").split(",").filter(Boolean);
  const focus = app.run();
  return focus ? [focus, ...app.runs.filter((run) => beside.includes(run.id) && run !== focus)] : [];
};

app.colour = (run) => {
  const order = app.chosen().indexOf(run);
  return css(`--series-${((order < 0 ? app.runs.indexOf(run) : order) % 7) + 1}`);
};

function toggleBeside(run, on) {
  const beside = new Set((app.place.with ?? "").split(",").filter(Boolean));
  if (on) beside.add(run.id);
  else beside.delete(run.id);
  go({ with: [...beside].join(",") });
}

// The header

function stateWord(run) {
  const steps = run.max_steps ? `step ${run.step} of ${run.max_steps}` : `step ${run.step}`;
  return `${run.state} · ${steps}`;
}

function drawHeader() {
  const focus = app.run();
  const training = app.runs.find((run) => run.state === "training" && run !== focus);
  const count = focus ? app.alarmCount[focus.id] ?? 0 : 0;
  fill(
    header,
    h(
      "div",
      { class: "bar" },
      h("a", { class: "brand", href: address({ view: "curves" }) }, "groupwise"),
      focus && runPicker(focus),
      focus && h("span", { class: `state ${focus.state}`, role: "status" }, stateWord(focus)),
      training &&
        h(
          "a",
          { class: "now", href: address({ run: training.id, step: null, group: null, member: null }) },
          `${training.name} is training`,
        ),
      h("span", { class: "push" }),
      app.live === false && h("span", { class: "lost", role: "status" }, "connection lost"),
      inReport && h("span", { class: "quiet" }, "report"),
      h("button", { class: "plain", onclick: cycleTheme, title: "Light, dark, or as the system (t)" }, themeWord()),
      h("button", { class: "plain", onclick: showHelp, "aria-label": "Keys", title: "Keys (?)" }, "?"),
    ),
    h(
      "nav",
      { "aria-label": "Views" },
      VIEWS.map(([name, label], index) =>
        h(
          "a",
          {
            href: address({ view: name }),
            "aria-current": app.place.view === name ? "page" : null,
            title: `${label} (${index + 1})`,
          },
          label,
          name === "alarms" && count > 0 && h("span", { class: "badge", "aria-label": plural(count, "alarm") }, count),
        ),
      ),
    ),
  );
}

function runPicker(focus) {
  if (app.runs.length < 2) return h("span", { class: "run", title: focus.title }, focus.name);
  const beside = app.chosen().slice(1);
  return h(
    "details",
    { class: "picker" },
    h("summary", {}, focus.name, beside.length > 0 && h("span", { class: "quiet" }, ` and ${beside.length} beside`)),
    h(
      "div",
      { class: "menu" },
      h("div", { class: "menu-head quiet" }, h("span", {}, "look at"), h("span", {}, "beside it")),
      app.runs.map((run) =>
        h(
          "div",
          { class: "menu-row" },
          h(
            "a",
            {
              href: address({ run: run.id, step: null, group: null, member: null }),
              "aria-current": run === focus ? "true" : null,
            },
            app.chosen().includes(run) && h("span", { class: "dot", style: { background: app.colour(run) } }),
            h("span", { class: "menu-name" }, run.name),
            h("span", { class: "quiet" }, stateWord(run)),
          ),
          h("input", {
            type: "checkbox",
            "aria-label": `draw ${run.name} beside`,
            checked: app.chosen().includes(run),
            disabled: run === focus,
            onchange: (event) => toggleBeside(run, event.target.checked),
          }),
        ),
      ),
    ),
  );
}

// Light and dark

const THEMES = ["auto", "light", "dark"];
const stored = () => {
  try {
    return localStorage.getItem("groupwise-theme") ?? "auto";
  } catch {
    return "auto";
  }
};
let theme = stored();
const themeWord = () => ({ auto: "◐ auto", light: "○ light", dark: "● dark" })[theme];

function applyTheme() {
  if (theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = theme;
}

function cycleTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try {
    localStorage.setItem("groupwise-theme", theme);
  } catch {
    // A browser that keeps nothing still shows it.
  }
  applyTheme();
  draw();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

// Help

function showHelp() {
  const dialog = h(
    "dialog",
    { "aria-label": "Keys" },
    h("h2", {}, "Keys"),
    h("dl", { class: "keys" }, KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])),
    h("form", { method: "dialog" }, h("button", {}, "Close")),
  );
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const number = Number(event.key);
  if (number >= 1 && number <= VIEWS.length) go({ view: VIEWS[number - 1][0] });
  else if (event.key === "?") showHelp();
  else if (event.key === "t") cycleTheme();
  else if (!app.view?.key?.(event)) return;
  event.preventDefault();
});

// Drawing

let drawing = 0;

async function draw() {
  const mine = ++drawing;
  app.view?.leave?.();
  app.view = null;
  drawHeader();
  const run = app.run();
  document.title = run ? `${run.name} · groupwise` : "groupwise";
  if (!run) {
    fill(main, h("p", { class: "quiet" }, "No run yet. It appears here when it starts."));
    return;
  }
  const make = VIEWS.find(([name]) => name === app.place.view)[2];
  const root = h("div", { class: `view ${app.place.view}` });
  try {
    const view = await make(root, app);
    if (mine !== drawing) {
      view?.leave?.();
      return;
    }
    app.view = view;
  } catch (error) {
    if (mine !== drawing) return;
    fill(root, h("p", { class: "error", role: "alert" }, error.message));
  }
  fill(main, root);
  app.view?.shown?.();
}

async function countAlarms(run) {
  try {
    const found = await get(of(run.id, "/alarms"), { again: true });
    app.alarmCount[run.id] = found.alarms.filter((alarm) => alarm.active).length;
  } catch {
    return; // The run has no metrics yet.
  }
  if (run === app.run()) drawHeader();
}

const refresh = later(async (id) => {
  const run = app.runs.find((one) => one.id === id);
  if (!run) return;
  countAlarms(run);
  if (app.chosen().includes(run)) await app.view?.refresh?.(run);
}, 150);

function changed(news) {
  const { run: id, ...overview } = news;
  const known = app.runs.find((run) => run.id === id);
  const before = app.chosen();
  if (overview.state === "gone") app.runs = app.runs.filter((run) => run.id !== id);
  else if (known) Object.assign(known, overview);
  else app.runs.unshift({ id, ...overview });
  const open = header.querySelector("details[open]");
  if (!open) drawHeader();
  // What someone reads is drawn anew only when it is of other runs: that closes what they have unfolded.
  const after = app.chosen();
  if (before.length !== after.length || before.some((run, index) => run !== after[index])) draw();
  else if (known) refresh(id);
}

window.addEventListener("hashchange", () => {
  app.place = readPlace();
  draw();
});
document.addEventListener("click", (event) => {
  const open = header.querySelector("details[open]");
  if (open && !open.contains(event.target)) open.open = false;
});

async function start() {
  applyTheme();
  app.place = readPlace();
  try {
    app.runs = await get("api/runs", { again: true });
  } catch (error) {
    fill(main, h("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  await draw();
  for (const run of app.chosen()) countAlarms(run);
  listen(changed, (live) => {
    if (app.live === live) return;
    app.live = live;
    drawHeader();
  });
}

start();
