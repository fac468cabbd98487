"use strict";
// What all charts share: the steps that are shown, the cursor, numbers as text, axes, and the panel that a chart stands in.
// Text from the data only ever becomes text nodes or canvas text.

const view = {
  full: [0, 1],       // all steps there are
  range: null,        // those shown, null: all
  hover: null,        // step under the cursor
  smooth: 0.01,       // share of the shown steps that a line is smoothed over
  pause: 2500,        // milliseconds between two questions to a live server
  runs: [],
  hiddenRuns: new Set(),
  shownKinds: new Set(),
  panels: [],
  onChange: [],       // called when range or cursor have changed
};

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, one] of Object.entries(value)) node.style.setProperty(name, one);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const visibleRuns = () => view.runs.filter((run) => !view.hiddenRuns.has(run.name));
const shown = () => view.range || view.full;
let theme = {};

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  theme = { ink: get("--ink"), dim: get("--dim"), line: get("--line"), card: get("--card"), accent: get("--accent"), shade: get("--shade") };
  theme.series = [0, 1, 2, 3, 4, 5, 6, 7].map((i) => get(`--s${i}`));
}
const colour = (i) => theme.series[i % theme.series.length];

// Numbers ------------------------------------------------------------------------------------------------------------

const grouped = (value) => Math.round(value).toLocaleString("en-US");

function short(value, digits = 4) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-4) return value.toExponential(Math.min(digits - 1, 2)).replace("e+", "e");
  if (size >= 1e4) {
    const [unit, name] = size >= 1e12 ? [1e12, "T"] : size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : [1e3, "k"];
    return `${String(Number((value / unit).toPrecision(digits)))}${name}`;
  }
  return String(Number(value.toPrecision(digits)));
}

const forms = {
  plain: (value) => short(value),
  loss: (value) => (isNumber(value) && Math.abs(value) < 100 ? value.toFixed(4) : short(value)),
  share: (value) => (!isNumber(value) ? "–" : value > 0 && value < 1e-4 ? `${short(value * 1e6, 3)} ppm` : `${short(value * 100, 3)} %`),
  percent: (value) => (isNumber(value) ? `${value > 0 ? "+" : ""}${short(value, 3)} %` : "–"),
};

function tickLabel(value, step) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e4) return short(value, 5);
  if (Math.abs(step) < 1e-3 && Math.abs(value) < 0.1) return String(Number(value.toPrecision(4)).toExponential());
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9))).replace(/^-0(\.0*)?$/, "0");
}

function niceStep(span, count) {
  const rough = span / Math.max(count, 1);
  const unit = 10 ** Math.floor(Math.log10(rough));
  return unit * [1, 2, 5, 10].find((one) => one * unit >= rough * 0.999);
}

function linearTicks(low, high, count) {
  const step = niceStep(high - low || 1, count);
  const first = Math.ceil(low / step - 1e-9), length = Math.floor(high / step + 1e-9) - first + 1; // first + 1 may be first
  return { ticks: Array.from({ length }, (_, i) => (first + i) * step), label: (value) => tickLabel(value, step) };
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 1) {
    const found = linearTicks(low, high, count);
    return { ticks: found.ticks.filter((tick) => tick > 0), label: found.label };
  }
  const every = Math.max(1, Math.ceil(decades / count));
  const within = decades < 2.2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1e-9; power++) {
    if (((power % every) + every) % every) continue;
    for (const digit of within) {
      const tick = digit * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return { ticks, label: (value) => short(value, 2) };
}

// Places in ascending arrays ---------------------------------------------------------------------------------------------

function firstAtLeast(array, value) {
  let low = 0, high = array.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(array, value) {
  const right = firstAtLeast(array, value);
  if (right === 0) return 0;
  if (right === array.length || value - array[right - 1] < array[right] - value) return right - 1;
  return right;
}

// The steps that are shown -------------------------------------------------------------------------------------------------

function zoom(low, high) {
  const [first, last] = view.full;
  if (low === undefined) view.range = null;
  else {
    const span = clamp(high - low, Math.min(4, last - first), last - first);
    const start = clamp(low, first, last - span);
    view.range = span >= (last - first) * 0.999 ? null : [start, start + span];
  }
  redraw();
}

function hover(step) {
  if (step === view.hover) return;
  view.hover = step;
  for (const panel of view.panels) if (panel.onScreen) panel.cursor();
  for (const listener of view.onChange) listener();
}

let pending = false;
function redraw() {
  for (const panel of view.panels) panel.stale = true;
  for (const listener of view.onChange) listener();
  schedule();
}
function schedule() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    for (const panel of view.panels) if (panel.stale && panel.onScreen) panel.render();
  });
}

addEventListener("beforeprint", () => view.panels.forEach((panel) => panel.render()));

const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const panel = view.panels.find((one) => one.element === entry.target);
      if (panel) panel.onScreen = entry.isIntersecting;
    }
    schedule();
  },
  { rootMargin: "300px" },
);
const sizes = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const panel = view.panels.find((one) => one.stage === entry.target);
    if (panel && entry.contentRect.width && Math.abs(entry.contentRect.width - panel.width) > 0.5) panel.stale = true;
  }
  schedule();
});

// The box at the cursor ----------------------------------------------------------------------------------------------------

function tip(event, ...lines) {
  const box = document.getElementById("tip");
  box.replaceChildren(...lines);
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const x = event.clientX + 14 + width > innerWidth ? Math.max(event.clientX - width - 14, 4) : event.clientX + 14;
  const y = event.clientY + 14 + height > innerHeight ? Math.max(event.clientY - height - 14, 4) : event.clientY + 14;
  box.style.left = `${Math.min(x, innerWidth - width - 4)}px`;
  box.style.top = `${y}px`;
}
function hideTip() {
  document.getElementById("tip").hidden = true;
}

// A panel ------------------------------------------------------------------------------------------------------------------

class Panel {
  // A card with a title, a legend, and two canvases: the drawing, and over it the cursor, which moves without a redraw.
  constructor(spec) {
    this.spec = spec;
    this.left = 52;
    this.top = 12;
    this.bottom = 20;
    this.right = 10;
    this.width = 0;
    this.stale = true;
    this.onScreen = false;
    this.pointers = new Map();
    this.tools = el("div", { class: "tools" });
    this.legend = el("div", { class: "legend" });
    this.canvas = el("canvas", { role: "img", "aria-label": spec.title });
    this.overlay = el("canvas", { class: "overlay" });
    this.stage = el("div", { class: "stage", style: { height: `${spec.size === "wide" && spec.keys ? 320 : 210}px` } }, this.canvas, this.overlay);
    const title = el("h3", {}, spec.title, spec.unit ? el("small", {}, ` ${spec.unit}`) : "");
    this.element = el("section", { class: `card ${spec.size || ""}` }, el("div", { class: "top" }, title, this.tools), this.legend, this.stage);
    if (spec.note) title.title = spec.note;
    this.listen();
    watcher.observe(this.element);
    sizes.observe(this.stage);
  }

  stepAt(x) {
    const [low, high] = shown();
    return low + ((x - this.left) / this.plotWidth) * (high - low);
  }
  xOf(step) {
    const [low, high] = shown();
    return this.left + ((step - low) / (high - low || 1)) * this.plotWidth;
  }
  get plotWidth() { return Math.max(this.width - this.left - this.right, 10); }
  get plotHeight() { return Math.max(this.height - this.top - this.bottom, 10); }

  // The height that the card has for the drawing: `least`, more where the cards beside it are higher.
  room(least, most) {
    if (this.roomAt !== innerWidth) {
      this.roomAt = innerWidth;
      this.stage.style.height = `${least}px`;
      const content = [...this.element.children].reduce((sum, child) => sum + child.getBoundingClientRect().height, 0) + 26;
      this.spare = clamp(this.element.clientHeight - content, 0, most - least);
    }
    return least + (innerWidth < 560 ? 0 : this.spare);
  }

  fit(height) {
    this.width = this.stage.clientWidth;
    this.height = height;
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    for (const canvas of [this.canvas, this.overlay]) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.stage.style.height = `${height}px`;
    const draw = this.canvas.getContext("2d");
    draw.clearRect(0, 0, this.width, height);
    draw.font = "11px system-ui, sans-serif";
    return draw;
  }

  stepAxis(draw) {
    const { ticks } = linearTicks(...shown(), Math.floor(this.plotWidth / 75));
    const base = this.top + this.plotHeight;
    draw.fillStyle = theme.dim;
    draw.strokeStyle = theme.line;
    draw.textAlign = "center";
    draw.textBaseline = "top";
    for (const tick of ticks) {
      if (tick !== Math.round(tick)) continue;
      const x = Math.round(this.xOf(tick)) + 0.5;
      draw.beginPath();
      draw.moveTo(x, base);
      draw.lineTo(x, base + 4);
      draw.stroke();
      const text = tick >= 1e4 ? short(tick, 5) : String(tick);
      const half = draw.measureText(text).width / 2;
      draw.fillText(text, clamp(x, half, this.width - half), base + 6);
    }
  }

  // Events of the shown kinds: thin lines in the colour of their kind, with its sign at the top.
  drawEvents(draw, height = this.plotHeight) {
    const taken = new Set();
    this.marks = [];
    for (const run of visibleRuns()) {
      for (const event of run.events) {
        if (!view.shownKinds.has(event.kind)) continue;
        const x = this.xOf(event.step);
        if (x < this.left - 1 || x > this.left + this.plotWidth + 1) continue;
        this.marks.push({ x, event, run });
        const spot = `${event.kind} ${Math.round(x)}`;
        if (taken.has(spot)) continue;
        taken.add(spot);
        const { paint, sign } = kindOf(event.kind);
        draw.strokeStyle = draw.fillStyle = paint;
        draw.globalAlpha = 0.4;
        draw.lineWidth = 1;
        draw.beginPath();
        draw.moveTo(Math.round(x) + 0.5, this.top);
        draw.lineTo(Math.round(x) + 0.5, this.top + height);
        draw.stroke();
        draw.globalAlpha = 1;
        draw.textAlign = "center";
        draw.textBaseline = "bottom";
        draw.font = "9px system-ui, sans-serif";
        draw.fillText(sign, x, this.top);
      }
    }
    draw.font = "11px system-ui, sans-serif";
  }

  marksNear(x) {
    return (this.marks || []).filter((mark) => Math.abs(mark.x - x) < 5).slice(0, 6);
  }

  cursor() {
    const draw = this.overlay.getContext("2d");
    draw.clearRect(0, 0, this.width, this.height);
    this.readout();
    if (this.selecting) {
      const [a, b] = this.selecting;
      draw.fillStyle = theme.shade;
      draw.fillRect(Math.min(a, b), this.top, Math.abs(b - a), this.plotHeight);
    }
    if (view.hover === null || this.width === 0) return;
    const x = this.xOf(view.hover);
    if (x < this.left - 0.5 || x > this.left + this.plotWidth + 0.5) return;
    draw.strokeStyle = theme.dim;
    draw.lineWidth = 1;
    draw.beginPath();
    draw.moveTo(Math.round(x) + 0.5, this.top);
    draw.lineTo(Math.round(x) + 0.5, this.top + this.plotHeight);
    draw.stroke();
    this.points(draw);
  }
  points() {}
  readout() {}
  onHover() {}

  // Mouse: move to read, drag to zoom, double-click for all. Fingers: one reads, two zoom, a double tap for all.
  listen() {
    const on = (name, action, options) => this.overlay.addEventListener(name, action, options);
    const place = (event) => {
      const box = this.overlay.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const inside = (x) => clamp(x, this.left, this.left + this.plotWidth);
    let start = null, pinched = null, tapped = 0;
    on("pointerdown", (event) => {
      if (event.button) return;
      const [x] = place(event);
      this.pointers.set(event.pointerId, x);
      this.overlay.setPointerCapture(event.pointerId);
      if (event.pointerType === "mouse") start = inside(x);
      else if (this.pointers.size === 2) pinched = [...this.pointers.values()].map((at) => this.stepAt(at));
      else {
        hover(Math.round(this.stepAt(inside(x))));
        this.onHover(event, ...place(event));
      }
    });
    on("pointermove", (event) => {
      const [x, y] = place(event);
      if (this.pointers.has(event.pointerId)) this.pointers.set(event.pointerId, x);
      if (pinched && this.pointers.size === 2) {
        const [a, b] = [...this.pointers.values()].map((at) => (at - this.left) / this.plotWidth);
        const span = (pinched[1] - pinched[0]) / (b - a || 1e-6);
        if (span > 0) zoom(pinched[0] - a * span, pinched[0] + (1 - a) * span);
        return;
      }
      if (start !== null && Math.abs(x - start) > 4) this.selecting = [start, inside(x)];
      if (x < this.left - 6 || x > this.width) return;
      hover(Math.round(this.stepAt(inside(x))));
      if (this.selecting) this.cursor();
      else this.onHover(event, x, y);
    });
    const up = (event) => {
      this.pointers.delete(event.pointerId);
      if (this.selecting) {
        const [a, b] = this.selecting.map((x) => this.stepAt(x));
        this.selecting = null;
        zoom(Math.min(a, b), Math.max(a, b));
      }
      if (event.type === "pointerup" && event.pointerType !== "mouse" && !pinched) {
        if (event.timeStamp - tapped < 300) zoom();
        tapped = event.timeStamp;
      }
      start = null;
      if (this.pointers.size < 2) pinched = null;
    };
    on("pointerup", up);
    on("pointercancel", up);
    on("pointerleave", (event) => {
      hideTip();
      if (event.pointerType === "mouse") hover(null);
    });
    on("dblclick", () => zoom());
    on("wheel", (event) => {
      if (!event.ctrlKey) return; // also what a touchpad's pinch sends; a plain wheel scrolls the page
      event.preventDefault();
      const [low, high] = shown(), at = this.stepAt(inside(place(event)[0])), by = Math.exp(event.deltaY / 200);
      zoom(at - (at - low) * by, at + (high - at) * by);
    }, { passive: false });
  }
}
