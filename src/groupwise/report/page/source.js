// The data source: the server of `groupwise watch`, or the data embedded in a report.

const carried = document.getElementById("carried");
const embedded = carried ? JSON.parse(carried.textContent) : null;

export const inReport = embedded !== null;

const cache = new Map();

export async function get(path, { fresh = false } = {}) {
  if (embedded) {
    if (path in embedded) return embedded[path];
    throw new Error("This report does not include that. Use `groupwise watch` to see the whole run.");
  }
  if (!fresh && cache.has(path)) return cache.get(path);
  const response = await fetch(path, { headers: { accept: "application/json" } });
  if (!response.ok) throw new Error((await response.text()) || `The server returned status ${response.status}.`);
  const value = await response.json();
  if (!fresh) store(path, value);
  return value;
}

// Groups and tokens of a step never change: cache the last few.
function store(path, value) {
  cache.set(path, value);
  if (cache.size > 60) cache.delete(cache.keys().next().value);
}

export function carries(path) {
  return embedded === null || path in embedded;
}

export const of = (run, rest = "") => `api/runs/${encodeURIComponent(run)}${rest}`;

export function listen(onChange, onStatus) {
  if (embedded) return;
  const events = new EventSource("api/events");
  events.addEventListener("change", (event) => onChange(JSON.parse(event.data)));
  events.onopen = () => onStatus(true);
  events.onerror = () => onStatus(false);
}
