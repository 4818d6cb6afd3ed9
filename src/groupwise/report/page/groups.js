// Groups: a prompt with all its answers side by side, best advantage first; and search.

import { h, fill, debounce } from "./dom.js";
import { ENDED, fromDifference, number, plural, signed } from "./format.js";
import { get, of, carries, inReport } from "./source.js";
import { nearest } from "./rewards.js";

const filter = { text: "", least_reward: "", most_reward: "", least_length: "", most_length: "", finish: "", first: "", last: "" };

export async function groups(root, app) {
  const run = app.run();
  const storedSteps = () => run.steps.filter((step) => carries(of(run.id, `/steps/${step}`)));
  let step = null;
  let list = [];
  let shown = null;
  let answeredBy = ""; // in a search: the member of the population whose groups are listed
  const side = h("aside", { "aria-label": "Groups of the step" });
  const detail = h("section", { class: "group", "aria-live": "polite" });
  const results = h("div");

  if (!storedSteps().length) {
    fill(root, h("p", { class: "quiet" }, "No rollouts stored yet."));
    return { refresh: () => storedSteps().length && app.go({}) };
  }

  async function openStep(next, group = null) {
    step = nearest(storedSteps(), next);
    const groups = await get(of(run.id, `/steps/${step}`));
    const prompts = fromDifference(groups.map((one) => one.prompt));
    list = groups.map((one, i) => ({ ...one, prompt: prompts[i] }));
    drawSide();
    const ids = list.map((one) => one.group);
    await openGroup(group !== null && ids.includes(group) ? group : ids.find((id) => carries(of(run.id, `/steps/${step}/groups/${id}`))) ?? null);
  }

  async function openGroup(group) {
    if (group === null) {
      fill(detail, h("p", { class: "quiet" }, "This step has no groups."));
      return;
    }
    app.go({ step, group, member: null }, { quietly: true });
    for (const item of side.querySelectorAll("[data-group]")) {
      const on = Number(item.dataset.group) === group;
      item.setAttribute("aria-current", on ? "true" : "false");
      if (on) item.scrollIntoView({ block: "nearest" });
    }
    try {
      shown = await get(of(run.id, `/steps/${step}/groups/${group}`));
      drawGroup();
    } catch (error) {
      fill(detail, h("p", { class: "error", role: "alert" }, error.message));
    }
  }

  function drawSide() {
    const steps = storedSteps();
    const at = steps.indexOf(step);
    const field = h("input", {
      type: "number", min: steps[0], max: steps.at(-1), value: step, "aria-label": "Step",
      onchange: (event) => openStep(Number(event.target.value)),
    });
    fill(
      side,
      h(
        "div",
        { class: "stepper" },
        h("button", { onclick: () => openStep(steps[at - 1]), disabled: at <= 0, "aria-label": "Previous step", title: "Previous step ([)" }, "‹"),
        h("label", {}, "step ", field),
        h("button", { onclick: () => openStep(steps[at + 1]), disabled: at >= steps.length - 1, "aria-label": "Next step", title: "Next step (])" }, "›"),
        h("span", { class: "quiet" }, `of ${plural(steps.length, "step")}`),
      ),
      !inReport && filters(),
      results,
      memberFilter(),
      h("ol", { class: "list" }, listed().map(item)),
    );
  }

  const listed = () => list.filter((one) => answeredBy === "" || String(one.population_member) === answeredBy);

  function memberFilter() {
    const members = [...new Set(list.map((one) => one.population_member).filter((name) => name !== undefined && name !== null))];
    if (!members.length) return null;
    if (answeredBy !== "" && !members.map(String).includes(answeredBy)) answeredBy = "";
    return h(
      "label",
      { class: "population-member" },
      "population member ",
      h(
        "select",
        { onchange: (event) => { answeredBy = event.target.value; drawSide(); const first = listed().find((one) => carries(of(run.id, `/steps/${step}/groups/${one.group}`))); if (first) openGroup(first.group); } },
        ["", ...members.map(String)].map((name) => h("option", { value: name, selected: answeredBy === name }, name || "all")),
      ),
    );
  }

  function item(one) {
    const values = one.members.filter((member) => member.error === null).map((member) => member.reward);
    const mean = values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
    const silent = one.members.every((member) => member.advantage === 0);
    const path = of(run.id, `/steps/${step}/groups/${one.group}`);
    return h(
      "li",
      {},
      h(
        "button",
        { "data-group": one.group, onclick: () => openGroup(one.group), disabled: !carries(path), title: carries(path) ? null : "not included in this report" },
        h("span", { class: "item-head" }, h("b", {}, number(mean)), bars(one.members), answeredBy === "" && memberLabel(one.population_member), silent && h("span", { class: "quiet" }, "no signal")),
        h("span", { class: "item-text" }, one.prompt),
      ),
    );
  }

  // Search over the whole run

  function filters() {
    const field = (name, label, type, more = {}) =>
      h("label", {}, label, h("input", { type, name, value: filter[name], step: "any", ...more, oninput: (event) => { filter[name] = event.target.value; searchLater(); } }));
    const open = Object.entries(filter).some(([name, value]) => name !== "text" && value !== "");
    return h(
      "form",
      { class: "search", role: "search", onsubmit: (event) => event.preventDefault() },
      h("input", { type: "search", id: "words", placeholder: "Search all answers  /", "aria-label": "Search all answers", value: filter.text, oninput: (event) => { filter.text = event.target.value; searchLater(); } }),
      h(
        "details",
        { open },
        h("summary", {}, "Filter"),
        h(
          "div",
          { class: "filters" },
          field("least_reward", "reward from", "number"), field("most_reward", "to", "number"),
          field("least_length", "tokens from", "number"), field("most_length", "to", "number"),
          field("first", "step from", "number"), field("last", "to", "number"),
          h(
            "label",
            { class: "both" },
            "finish reason",
            h(
              "select",
              { onchange: (event) => { filter.finish = event.target.value; searchLater(); } },
              [["", "any"], ["end", "finished"], ["stop", "stop string"], ["length", "truncated"], ["error", "error"]].map(([value, label]) =>
                h("option", { value, selected: filter.finish === value }, label),
              ),
            ),
          ),
        ),
      ),
    );
  }

  let searchNumber = 0;
  const searchLater = debounce(() => searchFrom(null), 250);

  async function searchFrom(previous, before = []) {
    const mine = ++searchNumber;
    if (Object.values(filter).every((value) => value === "")) {
      fill(results);
      side.classList.remove("searching");
      return;
    }
    side.classList.add("searching");
    if (previous === null) fill(results, h("p", { class: "quiet", role: "status" }, "Searching…"));
    const query = new URLSearchParams(Object.entries(filter).filter(([, value]) => value !== ""));
    if (previous !== null) {
      query.set("last", previous.go_on);
      query.set("skip", previous.skip);
    }
    let answer;
    try {
      answer = await get(of(run.id, `/search?${query}`), { fresh: true });
    } catch (error) {
      fill(results, h("p", { class: "error", role: "alert" }, error.message));
      return;
    }
    if (mine !== searchNumber) return;
    const hits = [...before, ...answer.rollouts];
    const more = answer.go_on !== null;
    const reached = !more ? " in the whole run" : answer.skip ? `, more in step ${answer.go_on}` : `, back to step ${answer.go_on + 1}`;
    fill(
      results,
      h("p", { class: "quiet", role: "status" }, `${plural(hits.length, "answer")} found${reached}`),
      h("ol", { class: "list hits" }, hits.map(hit)),
      more && h("button", { onclick: () => searchFrom(answer, hits) }, "Search older steps"),
    );
    // No hits yet and older steps remain: continue automatically.
    if (more && hits.length === 0) searchFrom(answer, hits);
  }

  function hit(one) {
    return h(
      "li",
      {},
      h(
        "button",
        { onclick: () => openStep(one.step, one.group) },
        h("span", { class: "item-head" }, h("b", {}, number(one.reward)), h("span", { class: "quiet" }, `step ${one.step} · group ${one.group} · ${one.length ?? "?"} tokens`)),
        h("span", { class: "item-text" }, one.error ?? one.excerpt),
      ),
    );
  }

  // One group

  function drawGroup() {
    const { prompt, example, members } = shown;
    fill(
      detail,
      h("h2", {}, `Step ${step}, group ${shown.group}`, memberLabel(example.population_member)),
      h("div", { class: "prompt" }, messages(prompt)),
      h("details", { class: "example" }, h("summary", {}, "Example"), h("pre", {}, JSON.stringify(example, null, 1))),
      h("div", { class: "members" }, members.map((member) => memberCard(member, app, { run, step, group: shown.group }))),
    );
  }

  fill(root, side, detail);
  await openStep(app.route.step ? Number(app.route.step) : storedSteps().at(-1), app.route.group ? Number(app.route.group) : null);

  return {
    refresh() {
      const field = side.querySelector(".stepper .quiet");
      if (field) field.textContent = `of ${plural(storedSteps().length, "step")}`;
      const next = side.querySelectorAll(".stepper button")[1];
      if (next) next.disabled = step >= storedSteps().at(-1);
      if (next) next.onclick = () => openStep(storedSteps()[storedSteps().indexOf(step) + 1]);
    },
    key(event) {
      const ids = listed().map((one) => one.group).filter((id) => carries(of(run.id, `/steps/${step}/groups/${id}`)));
      const at = ids.indexOf(shown?.group);
      const steps = storedSteps();
      const where = steps.indexOf(step);
      if (event.key === "j" && at < ids.length - 1) openGroup(ids[at + 1]);
      else if (event.key === "k" && at > 0) openGroup(ids[at - 1]);
      else if (event.key === "]" && where < steps.length - 1) openStep(steps[where + 1]);
      else if (event.key === "[" && where > 0) openStep(steps[where - 1]);
      else if (event.key === "/" && !inReport) side.querySelector("#words").focus();
      else return false;
      return true;
    },
  };
}

const memberLabel = (name) => name !== undefined && name !== null && h("span", { class: "quiet" }, ` member ${name}`);

export function messages(prompt) {
  if (typeof prompt === "string") return h("div", { class: "message" }, h("pre", {}, prompt));
  return prompt.map((message) => {
    const text = typeof message.content === "string" ? message.content : JSON.stringify(message.content, null, 1);
    if (message.role === "system") return h("details", { class: "message" }, h("summary", { class: "role" }, "system"), h("pre", {}, text));
    return h("div", { class: "message" }, h("span", { class: "role" }, message.role), h("pre", {}, text));
  });
}

function bars(members) {
  const values = members.filter((member) => member.error === null).map((member) => member.reward);
  const low = Math.min(0, ...values);
  const high = Math.max(low + 1e-9, ...values);
  return h(
    "span",
    { class: "bars", "aria-hidden": "true" },
    [...values].sort((a, b) => b - a).slice(0, 32).map((value) => h("i", { style: { height: `${2 + (12 * (value - low)) / (high - low)}px` } })),
  );
}

function memberCard(member, app, group) {
  const tone = member.error ? "failed" : member.advantage > 0 ? "better" : member.advantage < 0 ? "worse" : "same";
  const path = of(group.run.id, `/steps/${group.step}/groups/${group.group}/members/${member.member}`);
  return h(
    "article",
    { class: `member ${tone}`, "aria-label": `member ${member.member}` },
    h(
      "header",
      {},
      h("span", { class: "advantage", title: "Advantage over the group" }, member.error ? "not scored" : `A ${signed(member.advantage)}`),
      h("span", { class: "reward", title: "Reward" }, member.error ? "" : `reward ${number(member.reward)}`),
      carries(path) && h("a", { href: app.address({ view: "tokens", ...{ run: group.run.id }, step: group.step, group: group.group, member: member.member }) }, "tokens"),
    ),
    h(
      "p",
      { class: "facts" },
      Object.entries(member.rewards).map(([name, value]) => h("span", { class: "part" }, name, " ", h("b", {}, number(value)))),
      h("span", { class: member.finish === "length" ? "part warn" : "part" }, ENDED[member.finish] ?? member.finish),
      member.length !== undefined && h("span", { class: "part" }, plural(member.length, "token")),
    ),
    member.error && h("p", { class: "error" }, member.error),
    member.turns.length ? member.turns.map(turn) : answer(member.text),
  );
}

function turn(one) {
  if (one.policy) return answer(one.text);
  const args = one.arguments ? JSON.stringify(one.arguments) : "";
  const name = one.name === undefined ? "not sampled: " : `${one.name || "malformed call"} `;
  const line = args || one.text.trim().split("\n")[0].slice(0, 60);
  return h(
    "details",
    { class: `from-outside ${one.error ? "failed" : ""}` },
    h("summary", {}, h("b", {}, name), h("span", { class: "quiet" }, line)),
    one.error && h("p", { class: "error" }, one.error),
    h("pre", {}, one.text),
  );
}

const LONG = 1200;

function answer(text) {
  if (text.length <= LONG) return h("pre", { class: "answer" }, text);
  const box = h("pre", { class: "answer" }, `${text.slice(0, LONG)}…`);
  const more = h("button", { class: "plain", onclick: () => { box.textContent = text; more.remove(); } }, `Show all ${text.length.toLocaleString("en")} characters`);
  return [box, more];
}
