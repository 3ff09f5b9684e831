"use strict";
// Numbers as text, for people; and the colour of each kind. Times are microseconds unless a name says seconds.

const seconds = (s) => span(s * 1e6);

function span(us) {
  const size = Math.abs(us);
  if (size >= 1e8) return (us / 1e6).toFixed(0) + " s";
  if (size >= 1e6) return (us / 1e6).toFixed(size >= 1e7 ? 1 : 2) + " s";
  if (size >= 1e3) return (us / 1e3).toFixed(size >= 1e5 ? 0 : size >= 1e4 ? 1 : 2) + " ms";
  return us === 0 ? "0" : us.toFixed(size >= 100 ? 0 : 1) + " µs";
}

// A moment on an axis whose marks are `step` apart: as many digits as tell two marks apart.
function moment(us, step) {
  const [unit, size] = step >= 1e5 ? ["s", 1e6] : step >= 100 ? ["ms", 1e3] : ["µs", 1];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  return (us / size).toFixed(Math.min(digits, 6)) + " " + unit;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(n) >= 1024 && unit < 4) { n /= 1024; unit += 1; }
  return (unit ? n.toFixed(1) : n.toFixed(0)) + " " + units[unit];
}

const count = (n) => n.toLocaleString("en-US");

const percent = (share) => (100 * share).toFixed(share < 0.0995 ? 1 : 0) + " %";

// The distance of marks on an axis: 1, 2 or 5 times a power of ten, and not below `least`.
function nice(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((step) => step * power >= least * 0.999);
}

const KINDS = ["forward", "backward", "evaluation", "step", "update", "gradient", "commit", "drive read", "drive write", "drive",
  "ranks", "save", "stall"];
const PALE = new Set(["step", "ranks"]);

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

const colourOfKind = (kind) => "var(--" + variableOfKind(kind) + ")";

const variableOfKind = (kind) => (KINDS.includes(kind) ? kind.replace(" ", "-") : "other");

// An element with a class and children; strings become text, never markup.
function make(tag, style = "", ...children) {
  const element = document.createElement(tag);
  if (style) element.className = style;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// First index whose value is not below `value`, in ascending numbers.
function firstFrom(column, value) {
  let low = 0, high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}
