// Format numbers and texts for display.

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size >= 1) return value.toFixed(2);
  if (size >= 0.001) return value.toFixed(3);
  return value.toExponential(1);
}

// Axis ticks need no trailing digits.
export const tick = (value) => (Math.abs(value) >= 1000 || (value !== 0 && Math.abs(value) < 0.001) ? number(value) : String(Number(value.toPrecision(3))));

export const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + number(Math.abs(value));

export const percent = (value, digits = 1) =>
  value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// Prompts of a task often share a prefix: show each from where they differ.
export function fromDifference(texts) {
  const first = texts[0] ?? "";
  let shared = 0;
  while (shared < first.length && texts.every((text) => text[shared] === first[shared])) shared += 1;
  const start = first.lastIndexOf(" ", shared);
  if (texts.length < 2 || start < 12 || shared === first.length) return texts;
  return texts.map((text) => `…${text.slice(start + 1)}`);
}

export const ENDED = {
  end: "finished",
  stop: "stop string",
  length: "truncated",
};
