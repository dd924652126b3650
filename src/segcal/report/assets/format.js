// Undefined values come as null and infinities as texts, since JSON has neither.
function numeric(value) {
  if (value === null || value === undefined) return NaN;
  return typeof value === "number" ? value : value === "inf" ? Infinity : value === "-inf" ? -Infinity : NaN;
}

// How many decimals a column of numbers needs, so that they line up.
function decimalsFor(values) {
  const largest = Math.max(0, ...values.map((value) => Math.abs(numeric(value))).filter(Number.isFinite));
  if (largest === 0) return 3;
  return (
    Math.min(7, Math.max(0, 3 - Math.floor(Math.log10(largest) + 1e-9))) - (largest < 0.1 && largest >= 0.01 ? 1 : 0)
  );
}

function fixed(value, decimals) {
  const number = numeric(value);
  if (Number.isNaN(number)) return "–";
  if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
  const text = Math.abs(number).toFixed(decimals);
  return number < 0 && Number(text) !== 0 ? `−${text}` : text;
}

function signed(value, decimals) {
  const number = numeric(value);
  const text = fixed(value, decimals);
  return number > 0 && Number(text) !== 0 ? `+${text}` : text;
}

// Three significant digits, for a number that stands alone.
function brief(value) {
  const number = numeric(value);
  if (!Number.isFinite(number) || number === 0) return fixed(value, 0);
  if (Math.abs(number) < 1e-4) return number.toExponential(1).replace("-", "−");
  return fixed(number, Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(number))))));
}

function whole(value) {
  const number = numeric(value);
  return Number.isFinite(number) ? Math.round(number).toLocaleString("en-GB") : "–";
}

function shortCount(value) {
  const number = numeric(value);
  for (const [size, letter] of [
    [1e9, " billion"],
    [1e6, " million"],
    [1e4, "k"],
  ]) {
    if (number >= size) return `${Number((letter === "k" ? number / 1e3 : number / size).toPrecision(3))}${letter}`;
  }
  return whole(number);
}

// A share in percent that never claims nothing or everything when it is not.
function share(part, total) {
  const percent = (100 * numeric(part)) / numeric(total);
  if (!Number.isFinite(percent)) return "–";
  if (percent > 0 && percent < 0.01) return "<0.01%";
  if (percent > 99.99 && percent < 100) return ">99.99%";
  return `${percent.toFixed(percent === 0 || percent === 100 ? 0 : percent < 1 ? 2 : 1)}%`;
}

function pValue(value) {
  const number = numeric(value);
  if (Number.isNaN(number)) return "–";
  return number < 0.001 ? "<0.001" : number.toFixed(3);
}

function pText(value) {
  const text = pValue(value);
  return text.startsWith("<") ? `p < ${text.slice(1)}` : `p = ${text}`;
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function plural(count, word) {
  return `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
}

// "a, b and c"
function listed(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;
}

function clipped(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}
