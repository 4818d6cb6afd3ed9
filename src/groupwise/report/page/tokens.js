// Tokens: one answer, every token coloured by what was made of it.

import { h, fill, css } from "./dom.js";
import { ENDED, fromDifference, number, percent, signed } from "./format.js";
import { get, of, carries } from "./source.js";
import { nearest } from "./rewards.js";

// What a colour can stand for: the value of a token, and where on the scale it lies.
// A diverging scale runs from −1 (orange) over 0 to 1 (blue); a rising one from 0 to 1 (blue).
const BY = {
  advantage: {
    label: "Advantage", about: "what the token was reinforced by", diverging: true,
    value: (t) => (t.trained ? t.advantage : null), place: (v) => Math.max(-1, Math.min(1, v / 2)), ends: ["worse than its group", "better"],
  },
  logprob: {
    label: "Log-prob", about: "how surprising the token was to the sampler", diverging: false,
    value: (t) => (t.trained ? -t.logprob : null), place: (v) => Math.min(1, v / 5), ends: ["certain", "surprising"], show: (v) => number(-v),
  },
  ratio: {
    label: "Ratio", about: "probability at the update over that at sampling", diverging: true,
    value: (t) => t.ratio, place: (v) => Math.max(-1, Math.min(1, Math.log(Math.max(v, 1e-9)) / Math.log(1.3))), ends: ["became less likely", "more likely"],
  },
  entropy: {
    label: "Entropy", about: "how open the choice was, in nats", diverging: false,
    value: (t) => (t.trained ? t.entropy : null), place: (v) => Math.min(1, v / 2), ends: ["no choice", "open"],
  },
  mask: {
    label: "Mask", about: "which tokens are trained", diverging: false,
    value: (t) => (t.trained ? 1 : 0), place: (v) => 0.6 * v, ends: ["not trained", "trained"], show: (v) => (v ? "trained" : "not trained"),
  },
};
const NAMES = Object.keys(BY);

export async function tokens(root, app) {
  const run = app.run();
  const steps = run.steps.filter((step) => carries(of(run.id, `/steps/${step}`)));
  if (!steps.length) {
    fill(root, h("p", { class: "quiet" }, "No rollouts have been kept yet."));
    return {};
  }
  const step = nearest(steps, app.place.step ? Number(app.place.step) : steps.at(-1));
  const list = (await get(of(run.id, `/steps/${step}`))).filter((one) => carries(of(run.id, `/steps/${step}/groups/${one.group}`)));
  const prompts = fromDifference(list.map((one) => one.prompt));
  const wantedGroup = Number(app.place.group ?? list[0]?.group);
  const group = list.find((one) => one.group === wantedGroup) ?? list[0];
  if (!group) {
    fill(root, h("p", { class: "quiet" }, "This step has no groups."));
    return {};
  }
  const carried = group.members.filter((one) => carries(of(run.id, `/steps/${step}/groups/${group.group}/members/${one.member}`)));
  const ranked = carried.sort((a, b) => b.advantage - a.advantage || a.member - b.member);
  const member = ranked.find((one) => String(one.member) === app.place.member) ?? ranked[0];
  const found = await get(of(run.id, `/steps/${step}/groups/${group.group}/members/${member.member}`));
  const all = found.ids.map((id, i) => ({
    index: i,
    id,
    piece: found.pieces[i],
    trained: found.trained[i],
    logprob: found.logprobs[i],
    entropy: found.entropies[i],
    ratio: found.ratios ? found.ratios[i] : null,
    advantage: found.trained[i] ? found.advantage : 0,
    kind: found.trained[i] ? "sampled" : i < found.prompt_length ? "prompt" : "outside",
  }));
  const odd = all.some((token) => token.trained && token.index < found.prompt_length);
  let by = BY[app.place.by] ? app.place.by : "entropy";

  const flow = h("div", { class: "flow", role: "group", "aria-label": "Tokens; the arrow keys move from one to the next" });
  const info = h("div", { class: "info", "aria-live": "polite" });
  const legend = h("div", { class: "scale" });
  const spans = all.map((token) => {
    const span = h("span", { class: `token ${token.kind}${token.trained && token.index < found.prompt_length ? " fault" : ""}`, "data-index": token.index, tabindex: -1 }, visible(token.piece));
    return span;
  });
  const first = all.findIndex((token) => token.trained);
  const promptEnd = found.prompt_length;

  function paint() {
    const scale = BY[by];
    const values = all.map(scale.value);
    const up = css("--up");
    const down = css("--down");
    spans.forEach((span, i) => {
      const place = values[i] === null ? 0 : scale.place(values[i]);
      const strength = Math.round(100 * Math.min(1, Math.abs(place)) * 0.72);
      span.style.backgroundColor = strength ? `color-mix(in srgb, ${place < 0 ? down : up} ${strength}%, transparent)` : "";
    });
    const missing = by === "ratio" && !found.ratios;
    fill(
      legend,
      missing
        ? h("span", { class: "quiet" }, "No ratios: this answer has not been trained on.")
        : [
            h("span", { class: "quiet" }, scale.ends[0]),
            h("span", { class: `ramp ${scale.diverging ? "diverging" : "rising"}`, "aria-hidden": "true" }),
            h("span", { class: "quiet" }, scale.ends[1]),
          ],
      h("span", { class: "kinds" }, h("span", { class: "token prompt" }, "prompt"), h("span", { class: "token sampled" }, "sampled"), h("span", { class: "token outside" }, "from outside")),
    );
    for (const input of root.querySelectorAll("input[name=by]")) input.checked = input.value === by;
  }

  function choose(name) {
    by = name;
    app.go({ by }, { quietly: true });
    paint();
  }

  function tell(index) {
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
      cell("", { prompt: "prompt", sampled: "sampled, trained", outside: "from outside, not trained" }[token.kind]),
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
  flow.addEventListener("mouseover", (event) => indexOf(event) !== undefined && tell(Number(indexOf(event))));
  flow.addEventListener("focusin", (event) => indexOf(event) !== undefined && tell(Number(indexOf(event))));
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

  const promptFold = h("details", { class: "prompt-fold", open: promptEnd <= 60 || odd }, h("summary", {}, `The prompt, ${promptEnd} tokens`), h("div", { class: "flow-part" }, spans.slice(0, promptEnd)));
  fill(flow, promptFold, h("div", { class: "flow-part" }, spans.slice(promptEnd)));

  fill(
    root,
    h(
      "div",
      { class: "controls" },
      choice("Step", step, steps.map((one) => [one, one]), (value) => app.go({ step: value, group: null, member: null })),
      choice("Group", group.group, list.map((one, i) => [one.group, `${one.group} · ${prompts[i].slice(0, 40)}`]), (value) => app.go({ group: value, member: null })),
      choice("Member", member.member, ranked.map((one) => [one.member, `${one.member} · A ${signed(one.advantage)}`]), (value) => app.go({ member: value })),
      h("a", { href: app.address({ view: "groups", step, group: group.group }) }, "back to the group"),
    ),
    odd && h("p", { class: "error", role: "alert" }, "Tokens of the prompt are marked for training: the mask is wrong."),
    h("p", { class: "facts" }, h("span", { class: "part" }, "reward ", h("b", {}, number(found.reward))), h("span", { class: "part" }, "advantage ", h("b", {}, signed(found.advantage))), h("span", { class: "part" }, ENDED[found.finish] ?? found.finish)),
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
  fill(info, h("span", { class: "quiet" }, "Point at a token, or press Tab and the arrow keys, to see its numbers."));

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

// Line breaks and tabs are shown as signs too; an empty piece is a part of the character that follows.
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
