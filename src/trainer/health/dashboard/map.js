// Maps: a row for each tensor or block, steps from left to right, colour for the value. And tokens per expert.
// A grid: { first, last, columns: [Float32Array of rows] }, NaN where there is nothing.

const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
const DIVERGING = { light: [[0, 68, 136], [90, 150, 200], [240, 240, 236], [240, 160, 70], [170, 68, 0]], dark: [[120, 190, 255], [40, 100, 160], [38, 40, 46], [170, 90, 20], [255, 180, 90]] };
const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const stopsOf = (mode) => (mode === "change" ? DIVERGING[isDark() ? "dark" : "light"] : VIRIDIS);

function paintOf(stops, share) {
  const at = clamp(share, 0, 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2), part = at - i;
  return stops[i].map((one, k) => Math.round(one + (stops[i + 1][k] - one) * part));
}

// What the colours span: { share(value) in 0..1, low, high } for values that are not NaN. Zeros are lowest in a log map.
function colourScale(values, mode) {
  let low = Infinity, high = -Infinity;
  const take = mode === "log" ? (value) => (value > 0 ? Math.log2(value) : NaN) : (value) => value;
  for (const value of values) {
    const one = take(value);
    if (one < low) low = one;
    if (one > high) high = one;
  }
  if (low > high) [low, high] = [0, 0];
  if (mode === "change") high = clamp(Math.max(Math.abs(low), Math.abs(high)), 1, 5), low = -high; // of more it is the same colour
  const span = high - low || 1;
  const back = mode === "log" ? (value) => 2 ** value : (value) => value;
  return { share: (value) => (mode === "log" && value === 0 ? 0 : (take(value) - low) / span), low: back(low), high: back(high) };
}

function legendBar(scale, mode, form) {
  const stops = [0, 0.25, 0.5, 0.75, 1].map((at) => `rgb(${paintOf(stopsOf(mode), at)})`);
  const text = mode === "change" ? (value) => `× ${value >= 0 ? short(2 ** value, 2) : `1/${short(2 ** -value, 2)}`}` : form;
  return el("span", { class: "ramp" }, text(scale.low), el("i", { style: { background: `linear-gradient(90deg, ${stops})` } }), text(scale.high));
}

function select(label, options, chosen, action) {
  const box = el("select", { class: "tool", "aria-label": label }, ...options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
  box.addEventListener("change", () => action(box.value));
  return box;
}

class MapPanel extends Panel {
  // spec: title, group, quantities [{ id, key, label, mode: log | linear | change, form }], filters [[label, text]]
  constructor(spec) {
    super(spec);
    this.quantity = null;
    this.run = null;
    this.filter = "";
    const scroller = el("div", { class: "scroller" });
    this.stage.replaceWith(scroller);
    scroller.append(this.stage);
    if (spec.filters) {
      const box = el("input", { class: "tool", type: "search", placeholder: "filter rows", "aria-label": "filter rows", size: 12 });
      box.addEventListener("input", () => this.narrow(box.value));
      const ready = spec.filters.map(([label, text]) => el("button", { class: "tool", onclick: () => { box.value = text; this.narrow(text); } }, label));
      this.filterTools = [box, ...ready];
    }
  }

  narrow(text) {
    this.filter = text.trim().toLowerCase();
    this.stale = true;
    schedule();
  }

  choose() {
    const runs = visibleRuns().filter((run) => this.spec.quantities.some(({ key }) => run.grids.has(key)));
    if (!runs.includes(this.run)) this.run = view.runs.find((run) => this.run && run.name === this.run.name && runs.includes(run)) || runs[0] || null;
    const there = this.run ? this.spec.quantities.filter(({ key }) => this.run.grids.has(key)) : [];
    this.quantity = there.find((one) => this.quantity && one.id === this.quantity.id) || there[0] || null;
    const sign = `${runs.map((run) => run.name)}|${there.map((one) => one.id)}|${this.run && this.run.name}`;
    if (sign !== this.sign) {
      this.sign = sign;
      const again = () => { this.stale = true; schedule(); };
      this.tools.replaceChildren(
        there.length > 1 ? select("quantity", there.map((one) => [one.id, one.label]), this.quantity.id, (id) => { this.quantity = there.find((one) => one.id === id); again(); }) : "",
        runs.length > 1 ? select("run", runs.map((run) => [run.name, run.name]), this.run.name, (name) => { this.run = runs.find((run) => run.name === name); again(); }) : "",
      );
      this.ramp = el("span");
      this.legend.replaceChildren(this.ramp, ...(this.filterTools || []));
    }
    return this.quantity !== null;
  }

  render() {
    this.stale = false;
    if (!this.choose()) { // all runs are hidden
      this.rows = [];
      this.fit(20);
      return;
    }
    const names = this.run.rows[this.spec.group], grid = this.run.grids.get(this.quantity.key);
    const words = this.filter.split(/\s+/).filter(Boolean);
    const rows = names.map((name, i) => i).filter((i) => words.every((word) => names[i].toLowerCase().includes(word)));
    const room = this.spec.size === "all" ? 340 : this.room(innerWidth < 560 ? 150 : 190, 340) - this.top - this.bottom;
    const size = clamp(room / Math.max(rows.length, 1), 3, 34);
    this.width = this.stage.clientWidth;
    const widest = Math.max(...names.map((name) => name.length)) * 5.6 + 12;
    this.left = innerWidth < 560 && widest > 100 ? 10 : size >= 6 ? Math.min(widest, this.width * 0.36, 230) : 64;
    const draw = this.fit(this.top + this.bottom + Math.max(size * rows.length, 20));
    Object.assign(this, { rows, size, grid, names });
    const { mode, form } = this.quantity;
    const columns = mode === "change" ? changes(grid) : grid.columns;
    const texture = this.texture(columns, rows, mode, form);
    this.stepAxis(draw);
    if (this.left > 10) size >= 6 ? this.drawNames(draw) : this.drawBlocks(draw);
    draw.save();
    draw.beginPath();
    draw.rect(this.left, this.top, this.plotWidth, this.plotHeight);
    draw.clip();
    draw.imageSmoothingEnabled = false;
    if (texture) {
      for (let i = 0; i < columns.length; i++) {
        const [x, end] = this.extent(i);
        if (end < this.left || x > this.left + this.plotWidth) continue;
        draw.drawImage(texture, i, 0, 1, rows.length, x, this.top, Math.max(end - x, 1) + 0.5, size * rows.length);
      }
    }
    draw.restore();
    if (!rows.length) draw.fillText("no row with that in its name", this.left + 60, this.top + 16);
    this.drawEvents(draw, 0);
    this.cursor();
  }

  // Left and right edge of a column: up to the middle of the gap on each side.
  extent(i) {
    const { first, last } = this.grid, count = first.length;
    const gap = (k) => (k <= 0 || k >= count ? null : (last[k - 1] + first[k]) / 2);
    const usual = count > 1 ? (last[count - 1] - first[0]) / (count - 1) : 1;
    const from = gap(i) ?? first[i] - usual / 2, to = gap(i + 1) ?? last[i] + usual / 2;
    return [this.xOf(Math.max(from, first[i] - usual)), this.xOf(Math.min(to, last[i] + usual))];
  }

  texture(columns, rows, mode, form) {
    function* cells() { for (const column of columns) for (const row of rows) if (column[row] === column[row]) yield column[row]; }
    const scale = colourScale(cells(), mode), stops = stopsOf(mode);
    this.ramp.replaceChildren(legendBar(scale, mode, forms[form || "plain"]));
    if (!rows.length || !columns.length) return null;
    const table = Array.from({ length: 256 }, (_, i) => paintOf(stops, i / 255));
    const image = new ImageData(columns.length, rows.length);
    columns.forEach((column, x) => rows.forEach((row, y) => {
      const value = column[row];
      if (value !== value) return;
      const [red, green, blue] = table[clamp(Math.round(scale.share(value) * 255), 0, 255)] || table[0];
      image.data.set([red, green, blue, 255], 4 * (y * columns.length + x));
    }));
    const canvas = el("canvas", { width: columns.length, height: rows.length });
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  drawNames(draw) {
    draw.fillStyle = theme.dim;
    draw.textAlign = "right";
    draw.textBaseline = "middle";
    draw.font = "10px system-ui, sans-serif";
    const every = Math.ceil(11 / this.size);
    this.rows.forEach((row, i) => {
      if (i % every) return;
      let name = this.names[row];
      while (name.length > 4 && draw.measureText(name).width > this.left - 10) name = `…${name.slice(name.startsWith("…") ? 3 : 2)}`;
      draw.fillText(name, this.left - 6, this.top + (i + 0.5) * this.size);
    });
    draw.font = "11px system-ui, sans-serif";
  }

  // Where rows are too low for their names: that of each block at its first row.
  drawBlocks(draw) {
    draw.fillStyle = theme.dim;
    draw.textAlign = "right";
    draw.textBaseline = "top";
    draw.font = "10px system-ui, sans-serif";
    let block = "", below = -1;
    this.rows.forEach((row, i) => {
      const own = this.names[row].split(/[.:]/).slice(0, 2).join("."), y = this.top + i * this.size;
      if (own === block || y < below) return;
      block = own;
      below = y + 11;
      draw.fillText(own, this.left - 6, y);
    });
    draw.font = "11px system-ui, sans-serif";
  }

  onHover(event, x, y) {
    const marks = y < this.top + 2 ? this.marksNear(x) : [];
    if (marks.length) return tip(event, ...marks.map(eventLine));
    const row = this.rows && this.rows[Math.floor((y - this.top) / this.size)];
    if (row === undefined || x < this.left) return hideTip();
    const lines = [el("p", {}, el("b", {}, this.names[row]))];
    const step = this.stepAt(clamp(x, this.left, this.left + this.plotWidth));
    for (const { key, label, form, mode } of this.spec.quantities) {
      const grid = this.run.grids.get(key);
      if (!grid || mode === "change") continue;
      const i = nearestColumn(grid, step), value = grid.columns[i][row];
      if (value !== value) continue;
      const at = grid.first[i] === grid.last[i] ? `step ${grouped(grid.first[i])}` : `steps ${grouped(grid.first[i])} – ${grouped(grid.last[i])}`;
      lines.push(el("p", {}, `${label} `, el("b", {}, forms[form || "plain"](value)), mode === "log" && value > 0 ? ` = 2^${Math.log2(value).toFixed(1)}` : "", el("small", {}, `  ${at}`)));
    }
    return tip(event, ...lines);
  }
}

function nearestColumn({ first, last }, step) {
  const i = Math.max(firstAtLeast(first, step + 1e-9) - 1, 0);
  return i + 1 < first.length && first[i + 1] - step < step - last[i] ? i + 1 : i;
}

// log2 of each value against its row's median over all columns.
function changes(grid) {
  if (grid.changes) return grid.changes;
  const rows = Math.max(0, ...grid.columns.map((column) => column.length)), every = Math.ceil(grid.columns.length / 60);
  const medians = Array.from({ length: rows }, (_, row) => {
    const values = grid.columns.filter((column, i) => i % every === 0 && column[row] > 0).map((column) => column[row]).sort((a, b) => a - b);
    return values.length ? values[values.length >> 1] : NaN;
  });
  grid.changes = grid.columns.map((column) => column.map((value, row) => (value > 0 ? Math.log2(value / medians[row]) : NaN)));
  return grid.changes;
}

class LoadPanel extends Panel {
  // Tokens per expert of the last sampled step, against the block's mean. Its horizontal axis is experts, so it has no cursor.
  render() {
    this.stale = false;
    const runs = visibleRuns().filter((run) => run.load);
    if (!runs.length) return;
    this.run = runs.find((run) => this.run && run.name === this.run.name) || runs[0];
    this.tools.replaceChildren(runs.length > 1 ? select("run", runs.map((run) => [run.name, run.name]), this.run.name, (name) => { this.run = runs.find((run) => run.name === name); this.stale = true; schedule(); }) : "");
    const { tokens, step } = this.run.load, names = this.run.rows.moe || [];
    this.shares = tokens.map((row) => { const mean = row.reduce((a, b) => a + b, 0) / row.length || 1; return row.map((one) => one / mean); });
    this.size = clamp((this.room(innerWidth < 560 ? 150 : 190, 320) - this.top - this.bottom) / this.shares.length, 4, 26);
    this.names = names;
    this.rows = this.shares.map((_, i) => i);
    this.width = this.stage.clientWidth;
    this.left = Math.min(Math.max(...names.map((name) => name.length), 3) * 5.6 + 12, 110);
    const draw = this.fit(this.top + this.bottom + this.size * this.shares.length);
    const all = this.shares.flat(), top = Math.max(...all, 2), stops = VIRIDIS;
    this.legend.replaceChildren(legendBar({ low: 0, high: top }, "linear", (value) => `× ${short(value, 3)}`), el("small", {}, `tokens against the block's mean, step ${grouped(step)}`));
    this.shares.forEach((row, y) => row.forEach((value, x) => {
      const wide = this.plotWidth / row.length;
      draw.fillStyle = `rgb(${paintOf(stops, value / top)})`;
      draw.fillRect(this.left + x * wide, this.top + y * this.size, Math.max(wide - (wide > 5 ? 1 : 0), 0.5), Math.max(this.size - (this.size > 5 ? 1 : 0), 1));
    }));
    MapPanel.prototype.drawNames.call(this, draw);
    draw.textBaseline = "top";
    draw.textAlign = "left";
    draw.fillText("expert 0", this.left, this.height - this.bottom + 4);
    draw.textAlign = "right";
    draw.fillText(String(Math.max(...this.shares.map((row) => row.length)) - 1), this.width - this.right, this.height - this.bottom + 4);
  }

  cursor() {}

  listen() {
    const show = (event) => {
      const box = this.overlay.getBoundingClientRect();
      const y = Math.floor((event.clientY - box.top - this.top) / this.size), row = this.shares && this.shares[y];
      const x = row ? Math.floor(((event.clientX - box.left - this.left) / this.plotWidth) * row.length) : -1;
      if (!row || row[x] === undefined) return hideTip();
      return tip(event, el("p", {}, el("b", {}, `${this.names[y] || `block ${y}`}, expert ${x}`)), el("p", {}, `${grouped(this.run.load.tokens[y][x])} token${this.run.load.tokens[y][x] === 1 ? "" : "s"}, × ${short(row[x], 3)} of the mean`));
    };
    this.overlay.addEventListener("pointermove", show);
    this.overlay.addEventListener("pointerdown", show);
    this.overlay.addEventListener("pointerleave", hideTip);
  }
}
