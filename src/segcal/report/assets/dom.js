// Text only ever becomes a text node: nothing that comes from a study is read as HTML.
function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function html(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function section(id, title, lead, ...content) {
  return html(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    html("h2", { id: `${id}-title` }, title),
    lead ? html("p", { class: "lead" }, lead) : null,
    content,
  );
}

// A labelled drop-down list. Options are [value, text] pairs.
function chooser(label, options, chosen, change) {
  const id = `chooser-${chooser.made++}`;
  const list = html(
    "select",
    { id, on: { change: () => change(list.value) } },
    options.map(([value, text]) => html("option", { value }, text)),
  );
  list.value = chosen;
  return html("div", { class: "chooser" }, html("label", { for: id }, label), list);
}
chooser.made = 0;

// A few choices side by side; radio buttons underneath, so that arrow keys work.
function segments(label, options, chosen, change) {
  const group = `segments-${segments.made++}`;
  return html(
    "fieldset",
    { class: "segments" },
    html("legend", {}, label),
    html(
      "div",
      { class: "segments-row" },
      options.map(([value, text]) =>
        html(
          "label",
          {},
          html("input", {
            type: "radio",
            name: group,
            value,
            checked: value === chosen,
            on: { change: () => change(value) },
          }),
          html("span", {}, text),
        ),
      ),
    ),
  );
}
segments.made = 0;

// A command line that breaks between its arguments only.
function commandLine(text) {
  return html(
    "code",
    {},
    text.split(" ").map((word, index) => [index ? " " : "", html("span", {}, word)]),
  );
}

// Speaks to a screen reader what a chart shows at its chosen point.
function speak(text) {
  document.getElementById("spoken").textContent = text;
}

function controls(...children) {
  return html("div", { class: "controls" }, children);
}

// A table that names its columns (texts, or th elements) and rows ([name, cells], with texts or td elements as cells).
function gridTable({ label, caption, kind, heads, rows }) {
  const cellOf = (tag, attributes) => (content) => (content instanceof Node ? content : html(tag, attributes, content));
  const head = (content, index) => cellOf("th", { scope: "col", class: index ? null : "text" })(content);
  return scrolling(
    label,
    html(
      "table",
      { class: kind },
      caption ? html("caption", {}, caption) : null,
      html("thead", {}, html("tr", {}, heads.map(head))),
      html(
        "tbody",
        {},
        rows.map(([name, cells]) => html("tr", {}, html("th", { scope: "row" }, name), cells.map(cellOf("td", {})))),
      ),
    ),
  );
}

// A value with its interval below, if it has one.
function withRange(decimals, value, low, high) {
  const range = Number.isNaN(numeric(low)) ? null : `${fixed(low, decimals)} to ${fixed(high, decimals)}`;
  return [html("span", {}, fixed(value, decimals)), range && html("span", { class: "fine" }, range)];
}

// A wide table scrolls in its own box; the page does not.
function scrolling(label, content) {
  return html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);
}
