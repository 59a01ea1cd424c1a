"use strict";
(() => {
  const data = JSON.parse(document.getElementById("rows").textContent);
  const tree = document.getElementById("tree"), field = document.getElementById("search");
  const count = document.getElementById("count");
  const PAGE = 100, SUMS = [7, 8, 9, 10, 11];

  const bytes = n => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (n < 1024 || unit === "GiB") return unit === "B" ? `${n} B` : `${n.toFixed(1)} ${unit}`;
      n /= 1024;
    }
  };
  const time = us => us < 1000 ? `${us} us` : us < 1e6 ? `${(us / 1e3).toFixed(1)} ms` : `${(us / 1e6).toFixed(2)} s`;
  const shown = [n => n.toLocaleString("en"), n => n.toLocaleString("en"), n => n.toLocaleString("en"), bytes, time];

  const rows = data.rows.map(raw => {
    const [module, op, policy, rule, inputs, outputs, phase] = raw.slice(0, 7).map(i => data.texts[i]);
    const ran = phase === "compiled" ? [0, 0, 0, 0, 0] : SUMS.map(i => raw[i]);
    const text = [module || "(outside)", op, policy, rule, inputs, outputs, phase].join(" ").toLowerCase();
    return {module, op, policy, rule, inputs, outputs, phase, ran, text};
  });

  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  };
  const node = name => ({name, kids: new Map(), rows: [], sums: [0, 0, 0, 0, 0]});
  const root = node("");
  for (const row of rows) {
    let at = root;
    for (const part of row.module ? row.module.split(/[.:]/) : ["(outside)"]) {
      row.ran.forEach((n, i) => { at.sums[i] += n; });
      if (!at.kids.has(part)) at.kids.set(part, node(part));
      at = at.kids.get(part);
    }
    row.ran.forEach((n, i) => { at.sums[i] += n; });
    at.rows.push(row);
  }

  const line = (first, numbers) => {
    const element = make("div", undefined, "row");
    element.append(first, ...numbers.map((n, i) => make("span", shown[i](n))));
    return element;
  };
  const opLine = (row, withModule) => {
    const first = make("div");
    if (withModule) first.append(make("div", row.module || "(outside)"));
    first.append(row.op, " ", make("small", `${row.policy} (${row.rule}) ${row.inputs} \u2192 ${row.outputs}` +
      (row.phase === "forward" ? "" : ` [${row.phase}]`)));
    return line(first, row.ran);
  };
  /* Puts things into a place a page at a time: what nobody looks at costs nothing. */
  const fill = (place, things, draw, from = 0) => {
    place.append(...things.slice(from, from + PAGE).map(draw));
    const left = things.length - from - PAGE;
    if (left <= 0) return;
    const more = make("button", `${left.toLocaleString("en")} more`, "more");
    more.addEventListener("click", () => { more.remove(); fill(place, things, draw, from + PAGE); });
    place.append(more);
  };
  const branch = (kid, depth) => {
    const place = make("div"), button = make("button", kid.name), below = make("div");
    const first = make("div");
    first.style.paddingLeft = `${depth * 16}px`;
    first.append(button);
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") === "false";
      button.setAttribute("aria-expanded", String(open));
      below.replaceChildren();
      if (open) fill(below, inside(kid), thing => thing.kids ? branch(thing, depth + 1) : leaf(thing, depth + 1));
    });
    place.append(line(first, kid.sums), below);
    return place;
  };
  const leaf = (row, depth) => {
    const element = opLine(row, false);
    element.firstChild.style.paddingLeft = `${depth * 16 + 16}px`;
    return element;
  };
  const inside = at => [...at.rows, ...at.kids.values()];

  const head = make("div", undefined, "row head");
  head.append(...["module, op", "calls", "casts", "kept used", "cast", "host time"].map(text => make("span", text)));
  const body = make("div");
  tree.append(head, body);

  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    body.replaceChildren();
    if (!words.length) {
      count.textContent = `${rows.length.toLocaleString("en")} rows`;
      fill(body, inside(root), kid => branch(kid, 0));
      const only = body.querySelectorAll("button");
      if (only.length === 1) only[0].click();
      return;
    }
    const found = rows.filter(row => words.every(word => row.text.includes(word)));
    count.textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows`;
    fill(body, found, row => opLine(row, true));
  };
  let waiting;
  field.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(show, 60); });
  show();
})();
