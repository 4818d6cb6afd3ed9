// Groups: a prompt with every answer to it side by side, best advantage first; and finding them.

import { h, fill, later } from "./dom.js";
import { ENDED, fromDifference, number, plural, signed } from "./format.js";
import { get, of, carries, inReport } from "./source.js";
import { nearest } from "./rewards.js";

const wanted = { text: "", least_reward: "", most_reward: "", least_length: "", most_length: "", finish: "", first: "", last: "" };

export async function groups(root, app) {
  const run = app.run();
  const kept = () => run.steps.filter((step) => carries(of(run.id, `/steps/${step}`)));
  let step = null;
  let list = [];
  let shown = null;
  const side = h("aside", { "aria-label": "Groups of the step" });
  const detail = h("section", { class: "group", "aria-live": "polite" });
  const found = h("div");

  if (!kept().length) {
    fill(root, h("p", { class: "quiet" }, "No rollouts have been kept yet."));
    return { refresh: () => kept().length && app.go({}) };
  }

  async function openStep(next, group = null) {
    step = nearest(kept(), next);
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
    const steps = kept();
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
      found,
      h("ol", { class: "list" }, list.map(item)),
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
        { "data-group": one.group, onclick: () => openGroup(one.group), disabled: !carries(path), title: carries(path) ? null : "not in this report" },
        h("span", { class: "item-head" }, h("b", {}, number(mean)), bars(one.members), silent && h("span", { class: "quiet" }, "no signal")),
        h("span", { class: "item-text" }, one.prompt),
      ),
    );
  }

  // Search over the whole run

  function filters() {
    const field = (name, label, type, more = {}) =>
      h("label", {}, label, h("input", { type, name, value: wanted[name], step: "any", ...more, oninput: (event) => { wanted[name] = event.target.value; look(); } }));
    const open = Object.entries(wanted).some(([name, value]) => name !== "text" && value !== "");
    return h(
      "form",
      { class: "search", role: "search", onsubmit: (event) => event.preventDefault() },
      h("input", { type: "search", id: "words", placeholder: "Search all answers  /", "aria-label": "Search all answers", value: wanted.text, oninput: (event) => { wanted.text = event.target.value; look(); } }),
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
            "ended",
            h(
              "select",
              { onchange: (event) => { wanted.finish = event.target.value; look(); } },
              [["", "anyhow"], ["end", "by itself"], ["stop", "at a stop string"], ["length", "out of tokens"], ["error", "not scored (error)"]].map(([value, label]) =>
                h("option", { value, selected: wanted.finish === value }, label),
              ),
            ),
          ),
        ),
      ),
    );
  }

  let searching = 0;
  const look = later(() => searchFrom(null), 250);

  async function searchFrom(place, before = []) {
    const mine = ++searching;
    if (Object.values(wanted).every((value) => value === "")) {
      fill(found);
      side.classList.remove("searching");
      return;
    }
    side.classList.add("searching");
    if (place === null) fill(found, h("p", { class: "quiet", role: "status" }, "Looking…"));
    const query = new URLSearchParams(Object.entries(wanted).filter(([, value]) => value !== ""));
    if (place !== null) {
      query.set("last", place.go_on);
      query.set("skip", place.skip);
    }
    let answer;
    try {
      answer = await get(of(run.id, `/search?${query}`), { again: true });
    } catch (error) {
      fill(found, h("p", { class: "error", role: "alert" }, error.message));
      return;
    }
    if (mine !== searching) return;
    const hits = [...before, ...answer.rollouts];
    const more = answer.go_on !== null;
    const reached = !more ? " in the whole run" : answer.skip ? `, more of them in step ${answer.go_on}` : `, back to step ${answer.go_on + 1}`;
    fill(
      found,
      h("p", { class: "quiet", role: "status" }, `${plural(hits.length, "answer")} found${reached}`),
      h("ol", { class: "list hits" }, hits.map(hit)),
      more && h("button", { onclick: () => searchFrom(answer, hits) }, "Look further back"),
    );
    // Nothing yet and more to look through: go on by itself.
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
      h("h2", {}, `Step ${step}, group ${shown.group}`),
      h("div", { class: "prompt" }, messages(prompt)),
      h("details", { class: "example" }, h("summary", {}, "The example"), h("pre", {}, JSON.stringify(example, null, 1))),
      h("div", { class: "members" }, members.map((member) => memberCard(member, app, { run, step, group: shown.group }))),
    );
  }

  fill(root, side, detail);
  await openStep(app.place.step ? Number(app.place.step) : kept().at(-1), app.place.group ? Number(app.place.group) : null);

  return {
    refresh() {
      const field = side.querySelector(".stepper .quiet");
      if (field) field.textContent = `of ${plural(kept().length, "step")}`;
      const next = side.querySelectorAll(".stepper button")[1];
      if (next) next.disabled = step >= kept().at(-1);
      if (next) next.onclick = () => openStep(kept()[kept().indexOf(step) + 1]);
    },
    key(event) {
      const ids = list.map((one) => one.group).filter((id) => carries(of(run.id, `/steps/${step}/groups/${id}`)));
      const at = ids.indexOf(shown?.group);
      const steps = kept();
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

function memberCard(member, app, place) {
  const tone = member.error ? "failed" : member.advantage > 0 ? "better" : member.advantage < 0 ? "worse" : "same";
  const path = of(place.run.id, `/steps/${place.step}/groups/${place.group}/members/${member.member}`);
  return h(
    "article",
    { class: `member ${tone}`, "aria-label": `member ${member.member}` },
    h(
      "header",
      {},
      h("span", { class: "advantage", title: "Advantage: how much better than its group" }, member.error ? "not scored" : `A ${signed(member.advantage)}`),
      h("span", { class: "reward", title: "Reward" }, member.error ? "" : `reward ${number(member.reward)}`),
      carries(path) && h("a", { href: app.address({ view: "tokens", ...{ run: place.run.id }, step: place.step, group: place.group, member: member.member }) }, "tokens"),
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
  const asked = one.arguments ? JSON.stringify(one.arguments) : "";
  const name = one.name === undefined ? "from outside: " : `${one.name || "a call that could not be read"} `;
  const line = asked || one.text.trim().split("\n")[0].slice(0, 60);
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
  const more = h("button", { class: "plain", onclick: () => { box.textContent = text; more.remove(); } }, `show all ${text.length.toLocaleString("en")} characters`);
  return [box, more];
}
