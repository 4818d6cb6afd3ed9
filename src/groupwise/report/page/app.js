// The frame of the page: runs, views, theme and keyboard. The URL hash stores everything that is selected.

import { h, fill, debounce, css } from "./dom.js";
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
  ["j  k", "next or previous group (in Tokens: member)"],
  ["[  ]", "previous or next step"],
  ["/", "search"],
  ["← →", "in Tokens: previous or next token"],
  ["c", "in Tokens: colour by the next quantity"],
  ["t", "switch the theme: light, dark or system"],
  ["?", "show this help"],
];

const main = document.getElementById("main");
const header = document.getElementById("header");

const app = {
  runs: [],
  alarmCount: {},
  route: {},
  live: null,
  view: null,
};

// The route in the URL hash: #groups?run=a&step=3&group=1

function readRoute() {
  const [view, query = ""] = location.hash.replace(/^#/, "").split("?");
  const route = Object.fromEntries(new URLSearchParams(query));
  route.view = VIEWS.some(([name]) => name === view) ? view : "curves";
  return route;
}

function address(changes) {
  const route = { ...app.route, ...changes };
  const query = new URLSearchParams();
  for (const name of ["run", "with", "step", "group", "member", "by"]) {
    if (route[name] !== undefined && route[name] !== null && route[name] !== "") query.set(name, route[name]);
  }
  return `#${route.view}?${query}`;
}

function go(changes, { quietly = false } = {}) {
  const target = address(changes);
  if (quietly) {
    history.replaceState(null, "", target);
    app.route = readRoute();
  } else if (location.hash !== target) location.hash = target;
  else draw();
}

app.go = go;
app.address = address;

// Runs: the one in focus, and those compared with it

app.run = () => app.runs.find((run) => run.id === app.route.run) ?? app.runs[0];

app.chosen = () => {
  const compared = (app.route.with ?? "").split(",").filter(Boolean);
  const focus = app.run();
  return focus ? [focus, ...app.runs.filter((run) => compared.includes(run.id) && run !== focus)] : [];
};

app.colour = (run) => {
  const order = app.chosen().indexOf(run);
  return css(`--series-${((order < 0 ? app.runs.indexOf(run) : order) % 7) + 1}`);
};

function toggleCompared(run, on) {
  const compared = new Set((app.route.with ?? "").split(",").filter(Boolean));
  if (on) compared.add(run.id);
  else compared.delete(run.id);
  go({ with: [...compared].join(",") });
}

// The header

function stateText(run) {
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
      focus && h("span", { class: `state ${focus.state}`, role: "status" }, stateText(focus)),
      training &&
        h(
          "a",
          { class: "now", href: address({ run: training.id, step: null, group: null, member: null }) },
          `${training.name} is training`,
        ),
      h("span", { class: "push" }),
      app.live === false && h("span", { class: "lost", role: "status" }, "connection lost"),
      inReport && h("span", { class: "quiet" }, "report"),
      h("button", { class: "plain", onclick: cycleTheme, title: "Theme: light, dark or system (t)" }, themeLabel()),
      h("button", { class: "plain", onclick: showHelp, "aria-label": "Keyboard shortcuts", title: "Keyboard shortcuts (?)" }, "?"),
    ),
    h(
      "nav",
      { "aria-label": "Views" },
      VIEWS.map(([name, label], index) =>
        h(
          "a",
          {
            href: address({ view: name }),
            "aria-current": app.route.view === name ? "page" : null,
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
  const compared = app.chosen().slice(1);
  return h(
    "details",
    { class: "picker" },
    h("summary", {}, focus.name, compared.length > 0 && h("span", { class: "quiet" }, ` + ${compared.length} compared`)),
    h(
      "div",
      { class: "menu" },
      h("div", { class: "menu-head quiet" }, h("span", {}, "show"), h("span", {}, "compare")),
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
            h("span", { class: "quiet" }, stateText(run)),
          ),
          h("input", {
            type: "checkbox",
            "aria-label": `compare with ${run.name}`,
            checked: app.chosen().includes(run),
            disabled: run === focus,
            onchange: (event) => toggleCompared(run, event.target.checked),
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
const themeLabel = () => ({ auto: "◐ auto", light: "○ light", dark: "● dark" })[theme];

function applyTheme() {
  if (theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = theme;
}

function cycleTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try {
    localStorage.setItem("groupwise-theme", theme);
  } catch {
    // Without storage, the theme applies to this page only.
  }
  applyTheme();
  draw();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

// Help

function showHelp() {
  const dialog = h(
    "dialog",
    { "aria-label": "Keyboard shortcuts" },
    h("h2", {}, "Keyboard shortcuts"),
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
    fill(main, h("p", { class: "quiet" }, "No runs yet. They appear here when they start."));
    return;
  }
  const make = VIEWS.find(([name]) => name === app.route.view)[2];
  const root = h("div", { class: `view ${app.route.view}` });
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
    const response = await get(of(run.id, "/alarms"), { fresh: true });
    app.alarmCount[run.id] = response.alarms.filter((alarm) => alarm.active).length;
  } catch {
    return; // The run has no metrics yet.
  }
  if (run === app.run()) drawHeader();
}

const refresh = debounce(async (id) => {
  const run = app.runs.find((one) => one.id === id);
  if (!run) return;
  countAlarms(run);
  if (app.chosen().includes(run)) await app.view?.refresh?.(run);
}, 150);

function onChange(event) {
  const { run: id, ...overview } = event;
  const known = app.runs.find((run) => run.id === id);
  const before = app.chosen();
  if (overview.state === "gone") app.runs = app.runs.filter((run) => run.id !== id);
  else if (known) Object.assign(known, overview);
  else app.runs.unshift({ id, ...overview });
  const open = header.querySelector("details[open]");
  if (!open) drawHeader();
  // Redraw the view only if the selected runs changed: a redraw closes everything that is unfolded.
  const after = app.chosen();
  if (before.length !== after.length || before.some((run, index) => run !== after[index])) draw();
  else if (known) refresh(id);
}

window.addEventListener("hashchange", () => {
  app.route = readRoute();
  draw();
});
document.addEventListener("click", (event) => {
  const open = header.querySelector("details[open]");
  if (open && !open.contains(event.target)) open.open = false;
});

async function start() {
  applyTheme();
  app.route = readRoute();
  try {
    app.runs = await get("api/runs", { fresh: true });
  } catch (error) {
    fill(main, h("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  await draw();
  for (const run of app.chosen()) countAlarms(run);
  listen(onChange, (live) => {
    if (app.live === live) return;
    app.live = live;
    drawHeader();
  });
}

start();
