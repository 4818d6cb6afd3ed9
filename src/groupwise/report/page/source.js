// Where the numbers come from: a server that reads the run's files, or a report that carries them.

const carried = document.getElementById("carried");
const answers = carried ? JSON.parse(carried.textContent) : null;

export const inReport = answers !== null;

const kept = new Map();

export async function get(path, { again = false } = {}) {
  if (answers) {
    if (path in answers) return answers[path];
    throw new Error("This report does not carry that; `groupwise watch` shows all of the run.");
  }
  if (!again && kept.has(path)) return kept.get(path);
  const response = await fetch(path, { headers: { accept: "application/json" } });
  if (!response.ok) throw new Error((await response.text()) || `The server answered ${response.status}.`);
  const value = await response.json();
  if (!again) keep(path, value);
  return value;
}

// Groups and tokens of a step never change: the last few stay at hand.
function keep(path, value) {
  kept.set(path, value);
  if (kept.size > 60) kept.delete(kept.keys().next().value);
}

export function carries(path) {
  return answers === null || path in answers;
}

export const of = (run, rest = "") => `api/runs/${encodeURIComponent(run)}${rest}`;

export function listen(call, tell) {
  if (answers) return;
  const events = new EventSource("api/events");
  events.addEventListener("change", (event) => call(JSON.parse(event.data)));
  events.onopen = () => tell(true);
  events.onerror = () => tell(false);
}
