// Tokens: one answer token by token, coloured by a quantity of the update.

import { h, fill, css } from "./dom.js";
import { ENDED, fromDifference, number, percent, signed } from "./format.js";
import { get, of, carries } from "./source.js";
import { nearest } from "./rewards.js";

// The quantities to colour by: the value of a token, and its position on the scale.
// A diverging scale runs from −1 (orange) through 0 to 1 (blue); a rising one from 0 to 1 (blue).
const BY = {
  advantage: {
    label: "Advantage", about: "advantage that weights the token in the loss", diverging: true,
    value: (t) => (t.trained ? t.advantage : null), position: (v) => Math.max(-1, Math.min(1, v / 2)), ends: ["worse than the group", "better"],
  },
  logprob: {
    label: "Log-prob", about: "log-probability of the token when it was sampled", diverging: false,
    value: (t) => (t.trained ? -t.logprob : null), position: (v) => Math.min(1, v / 5), ends: ["likely", "unlikely"], show: (v) => number(-v),
  },
  ratio: {
    label: "Ratio", about: "probability during the update divided by that at sampling", diverging: true,
    value: (t) => t.ratio, position: (v) => Math.max(-1, Math.min(1, Math.log(Math.max(v, 1e-9)) / Math.log(1.3))), ends: ["less likely", "more likely"],
  },
  entropy: {
    label: "Entropy", about: "entropy of the next-token distribution, in nats", diverging: false,
    value: (t) => (t.trained ? t.entropy : null), position: (v) => Math.min(1, v / 2), ends: ["low", "high"],
  },
  mask: {
    label: "Mask", about: "which tokens are trained", diverging: false,
    value: (t) => (t.trained ? 1 : 0), position: (v) => 0.6 * v, ends: ["not trained", "trained"], show: (v) => (v ? "trained" : "not trained"),
  },
};
const NAMES = Object.keys(BY);

export async function tokens(root, app) {
  const run = app.run();
  const steps = run.steps.filter((step) => carries(of(run.id, `/steps/${step}`)));
  if (!steps.length) {
    fill(root, h("p", { class: "quiet" }, "No rollouts stored yet."));
    return {};
  }
  const step = nearest(steps, app.route.step ? Number(app.route.step) : steps.at(-1));
  const list = (await get(of(run.id, `/steps/${step}`))).filter((one) => carries(of(run.id, `/steps/${step}/groups/${one.group}`)));
  const prompts = fromDifference(list.map((one) => one.prompt));
  const wantedGroup = Number(app.route.group ?? list[0]?.group);
  const group = list.find((one) => one.group === wantedGroup) ?? list[0];
  if (!group) {
    fill(root, h("p", { class: "quiet" }, "This step has no groups."));
    return {};
  }
  const carried = group.members.filter((one) => carries(of(run.id, `/steps/${step}/groups/${group.group}/members/${one.member}`)));
  const ranked = carried.sort((a, b) => b.advantage - a.advantage || a.member - b.member);
  const member = ranked.find((one) => String(one.member) === app.route.member) ?? ranked[0];
  const rollout = await get(of(run.id, `/steps/${step}/groups/${group.group}/members/${member.member}`));
  const all = rollout.ids.map((id, i) => ({
    index: i,
    id,
    piece: rollout.pieces[i],
    trained: rollout.trained[i],
    logprob: rollout.logprobs[i],
    entropy: rollout.entropies[i],
    ratio: rollout.ratios ? rollout.ratios[i] : null,
    advantage: rollout.trained[i] ? rollout.advantage : 0,
    kind: rollout.trained[i] ? "sampled" : i < rollout.prompt_length ? "prompt" : "outside",
  }));
  const odd = all.some((token) => token.trained && token.index < rollout.prompt_length);
  let by = BY[app.route.by] ? app.route.by : "entropy";

  const flow = h("div", { class: "flow", role: "group", "aria-label": "Tokens; use the arrow keys to move" });
  const info = h("div", { class: "info", "aria-live": "polite" });
  const legend = h("div", { class: "scale" });
  const spans = all.map((token) => {
    const span = h("span", { class: `token ${token.kind}${token.trained && token.index < rollout.prompt_length ? " fault" : ""}`, "data-index": token.index, tabindex: -1 }, visible(token.piece));
    return span;
  });
  const first = all.findIndex((token) => token.trained);
  const promptEnd = rollout.prompt_length;

  function paint() {
    const scale = BY[by];
    const values = all.map(scale.value);
    const up = css("--up");
    const down = css("--down");
    spans.forEach((span, i) => {
      const position = values[i] === null ? 0 : scale.position(values[i]);
      const strength = Math.round(100 * Math.min(1, Math.abs(position)) * 0.72);
      span.style.backgroundColor = strength ? `color-mix(in srgb, ${position < 0 ? down : up} ${strength}%, transparent)` : "";
    });
    const missing = by === "ratio" && !rollout.ratios;
    fill(
      legend,
      missing
        ? h("span", { class: "quiet" }, "No ratios: this answer was not used in an update.")
        : [
            h("span", { class: "quiet" }, scale.ends[0]),
            h("span", { class: `ramp ${scale.diverging ? "diverging" : "rising"}`, "aria-hidden": "true" }),
            h("span", { class: "quiet" }, scale.ends[1]),
          ],
      h("span", { class: "kinds" }, h("span", { class: "token prompt" }, "prompt"), h("span", { class: "token sampled" }, "sampled"), h("span", { class: "token outside" }, "not sampled")),
    );
    for (const input of root.querySelectorAll("input[name=by]")) input.checked = input.value === by;
  }

  function choose(name) {
    by = name;
    app.go({ by }, { quietly: true });
    paint();
  }

  function showValues(index) {
    const token = all[index];
    if (!token) return;
    for (const old of flow.querySelectorAll(".on")) old.classList.remove("on");
    spans[index].classList.add("on");
    const cell = (name, value) => h("span", {}, h("span", { class: "quiet" }, name), " ", h("b", {}, value));
    fill(
      info,
      h("code", {}, JSON.stringify(token.piece)),
      cell("token", `${index + 1} of ${all.length}`),
      cell("id", token.id),
      cell("", { prompt: "prompt", sampled: "sampled, trained", outside: "not sampled, not trained" }[token.kind]),
      token.trained && [
        cell("log-prob", number(token.logprob)),
        cell("probability", percent(Math.exp(token.logprob))),
        cell("entropy", number(token.entropy)),
        cell("ratio", token.ratio === null ? "–" : token.ratio.toFixed(3)),
        cell("advantage", signed(token.advantage)),
      ],
    );
  }

  const indexOf = (event) => event.target.closest("[data-index]")?.dataset.index;
  flow.addEventListener("mouseover", (event) => indexOf(event) !== undefined && showValues(Number(indexOf(event))));
  flow.addEventListener("focusin", (event) => indexOf(event) !== undefined && showValues(Number(indexOf(event))));
  flow.addEventListener("click", (event) => indexOf(event) !== undefined && focus(Number(indexOf(event))));

  function focus(index) {
    const span = spans[Math.max(0, Math.min(spans.length - 1, index))];
    for (const old of flow.querySelectorAll("[tabindex='0']")) old.tabIndex = -1;
    span.tabIndex = 0;
    span.closest("details")?.setAttribute("open", "");
    span.focus();
  }

  const choice = (name, value, options, change) =>
    h("label", {}, `${name} `, h("select", { onchange: (event) => change(event.target.value) }, options.map(([key, label]) => h("option", { value: key, selected: String(key) === String(value) }, label))));

  const promptFold = h("details", { class: "prompt-fold", open: promptEnd <= 60 || odd }, h("summary", {}, `Prompt, ${promptEnd} tokens`), h("div", { class: "flow-part" }, spans.slice(0, promptEnd)));
  fill(flow, promptFold, h("div", { class: "flow-part" }, spans.slice(promptEnd)));

  fill(
    root,
    h(
      "div",
      { class: "controls" },
      choice("Step", step, steps.map((one) => [one, one]), (value) => app.go({ step: value, group: null, member: null })),
      choice("Group", group.group, list.map((one, i) => [one.group, `${one.group} · ${prompts[i].slice(0, 40)}`]), (value) => app.go({ group: value, member: null })),
      choice("Member", member.member, ranked.map((one) => [one.member, `${one.member} · A ${signed(one.advantage)}`]), (value) => app.go({ member: value })),
      h("a", { href: app.address({ view: "groups", step, group: group.group }) }, "Back to the group"),
    ),
    odd && h("p", { class: "error", role: "alert" }, "Prompt tokens are marked as trained: the mask is wrong."),
    h("p", { class: "facts" }, h("span", { class: "part" }, "reward ", h("b", {}, number(rollout.reward))), h("span", { class: "part" }, "advantage ", h("b", {}, signed(rollout.advantage))), h("span", { class: "part" }, ENDED[rollout.finish] ?? rollout.finish)),
    h(
      "fieldset",
      { class: "by" },
      h("legend", {}, "Colour by"),
      NAMES.map((name) => h("label", { title: BY[name].about }, h("input", { type: "radio", name: "by", value: name, onchange: () => choose(name) }), h("span", {}, BY[name].label))),
    ),
    legend,
    flow,
    info,
  );
  spans[Math.max(first, 0)].tabIndex = 0;
  fill(info, h("span", { class: "quiet" }, "Hover over a token, or use Tab and the arrow keys, to see its values."));

  return {
    shown: paint,
    key(event) {
      const at = document.activeElement?.dataset?.index;
      const ids = ranked.map((one) => one.member);
      const where = ids.indexOf(member.member);
      const here = steps.indexOf(step);
      if (event.key === "ArrowRight" && at !== undefined) focus(Number(at) + 1);
      else if (event.key === "ArrowLeft" && at !== undefined) focus(Number(at) - 1);
      else if (event.key === "c") choose(NAMES[(NAMES.indexOf(by) + 1) % NAMES.length]);
      else if (event.key === "j" && where < ids.length - 1) app.go({ step, group: group.group, member: ids[where + 1] });
      else if (event.key === "k" && where > 0) app.go({ step, group: group.group, member: ids[where - 1] });
      else if (event.key === "]" && here < steps.length - 1) app.go({ step: steps[here + 1], group: null, member: null });
      else if (event.key === "[" && here > 0) app.go({ step: steps[here - 1], group: null, member: null });
      else return false;
      return true;
    },
  };
}

// Show line breaks and tabs as symbols. An empty piece is part of the next character.
function visible(piece) {
  if (piece === "") return h("span", { class: "sign" }, "∙");
  const parts = [];
  for (const part of piece.split(/(\n|\t)/)) {
    if (part === "\n") parts.push(h("span", { class: "sign" }, "⏎"), "\n");
    else if (part === "\t") parts.push(h("span", { class: "sign" }, "⇥"), "\t");
    else if (part) parts.push(part);
  }
  return parts;
}
