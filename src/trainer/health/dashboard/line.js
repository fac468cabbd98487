// Charts of curves over steps.
// A curve: { mid, first, last, mean, low, high } by bucket; low and high are mean where nothing was put together.

const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 4]];

class LinePanel extends Panel {
  // spec: title, unit, keys [{ key, label, dots }], primary [keys shown at first with several runs], log, form, zero, low (axis
  // starts there)
  constructor(spec) {
    super(spec);
    this.log = !!spec.log;
    this.off = new Set();
    if (view.runs.length > 1 && spec.primary) for (const { key } of spec.keys) if (!spec.primary.includes(key)) this.off.add(key);
    this.logButton = el("button", { class: "tool", title: "logarithmic axis", "aria-pressed": String(this.log), onclick: () => this.flip() }, "log");
    this.tools.append(this.logButton);
    this.chips = new Map();
  }

  flip() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.stale = true;
    schedule();
  }

  // What is drawn: one entry for each shown run and key that has values.
  lines() {
    const several = view.runs.length > 1, found = [];
    this.spec.keys.forEach(({ key, dots }, i) => {
      if (this.off.has(key)) return;
      for (const run of visibleRuns()) {
        const curve = run.curves.get(key);
        if (curve) found.push({ run, key, curve, dots, paint: colour(several ? run.index : i), dash: several ? DASHES[i % DASHES.length] : [] });
      }
    });
    return found;
  }

  buildLegend() {
    const several = view.runs.length > 1;
    const there = this.spec.keys.map((one, i) => [one, i]).filter(([{ key }]) => visibleRuns().some((run) => run.curves.has(key)));
    const sign = `${there.map(([{ key }]) => key)}|${visibleRuns().map((run) => run.name)}`;
    if (sign === this.sign) return;
    this.sign = sign;
    this.chips.clear();
    this.legend.replaceChildren(
      ...there.map(([{ key, label, dots }, i]) => {
        const values = visibleRuns().filter((run) => run.curves.has(key)).map((run) => {
          const value = el("b", several ? { style: { color: `var(--t${run.index % 8})` }, title: run.name } : {});
          this.chips.set(`${key} ${run.name}`, value);
          return value;
        });
        const chip = el("button", { class: "chip", "aria-pressed": String(!this.off.has(key)), title: `show or hide ${label}` },
          swatch(several ? "var(--dim)" : `var(--s${i % 8})`, several ? DASHES[i % DASHES.length] : [], dots), el("span", {}, label), ...values);
        chip.addEventListener("click", () => {
          this.off.has(key) ? this.off.delete(key) : this.off.add(key);
          chip.setAttribute("aria-pressed", String(!this.off.has(key)));
          this.stale = true;
          schedule();
        });
        return chip;
      }),
    );
  }

  render() {
    this.stale = false;
    this.buildLegend();
    const compact = innerWidth < 560;
    const height = this.spec.size === "wide" ? (compact ? 230 : 320) : this.room(compact ? 180 : 210, 330);
    const lines = this.lines();
    this.height = height;
    this.prepare(lines);
    this.range(lines);
    const draw = this.fit(height);
    const [low, high] = this.y;
    const { ticks, label } = (this.isLog ? logTicks : linearTicks)(low, high, Math.floor(this.plotHeight / 38));
    const percent = (tick) => `${tickLabel(tick * 100, (ticks[1] - ticks[0]) * 100 || 1)} %`;
    const labels = ticks.map(this.spec.form === "share" ? percent : label);
    this.left = Math.max(36, ...labels.map((one) => draw.measureText(one).width + 12));
    draw.textAlign = "right";
    draw.textBaseline = "middle";
    draw.lineWidth = 1;
    ticks.forEach((tick, i) => {
      const y = Math.round(this.yOf(tick)) + 0.5;
      draw.strokeStyle = theme.line;
      draw.beginPath();
      draw.moveTo(this.left, y);
      draw.lineTo(this.left + this.plotWidth, y);
      draw.stroke();
      draw.fillStyle = theme.dim;
      draw.fillText(labels[i], this.left - 6, y);
    });
    if (this.spec.zero && low < 0 && high > 0) {
      draw.strokeStyle = theme.dim;
      draw.beginPath();
      draw.moveTo(this.left, Math.round(this.yOf(0)) + 0.5);
      draw.lineTo(this.left + this.plotWidth, Math.round(this.yOf(0)) + 0.5);
      draw.stroke();
    }
    this.stepAxis(draw);
    draw.save();
    draw.beginPath();
    draw.rect(this.left, this.top - 1, this.plotWidth, this.plotHeight + 2);
    draw.clip();
    for (const line of lines) this.drawLine(draw, line);
    draw.restore();
    this.drawBeyond(draw, lines);
    this.drawEvents(draw);
    this.cursor();
  }

  // Indices of what is shown, one more on each side, and the smoothed means.
  prepare(lines) {
    const [low, high] = shown();
    for (const line of lines) {
      const { mid, mean } = line.curve;
      line.from = Math.max(firstAtLeast(mid, low) - 1, 0);
      line.to = Math.min(firstAtLeast(mid, high) + 1, mid.length);
      const count = line.to - line.from;
      line.smooth = view.smooth && count > 60 && !line.dots && !this.spec.exact ? smoothed(mid, mean, view.smooth * (high - low)) : null;
    }
  }

  // The axis: 99 of 100 values after the steep beginning, and the smoothed line; it reaches out to the extremes as long as
  // they leave the rest readable.
  range(lines) {
    const [start, end] = shown();
    let low = Infinity, high = -Infinity, least = Infinity, greatest = -Infinity;
    const lows = [], highs = [], some = (test) => lines.some(({ curve, from, to }) => curve.low.slice(from, to).some(test));
    const positive = some((value) => value > 0) && !some((value) => value < 0); // a zero lies below a logarithmic axis
    for (const { curve, from, to, smooth } of lines) {
      const skip = to - from > 40 && start <= view.full[0] ? start + (end - start) * 0.03 : -Infinity;
      for (let i = from; i < to; i++) {
        if (curve.mid[i] < start || curve.mid[i] > end) continue;
        if (this.log && positive && curve.low[i] === 0) continue;
        least = Math.min(least, curve.low[i]);
        greatest = Math.max(greatest, curve.high[i]);
        if (curve.mid[i] < skip) continue;
        lows.push(curve.low[i]);
        highs.push(curve.high[i]);
        if (smooth) low = Math.min(low, smooth[i]), high = Math.max(high, smooth[i]);
      }
    }
    if (lows.length) {
      low = Math.min(low, lows.sort((a, b) => a - b)[Math.floor(lows.length * 0.005)]);
      high = Math.max(high, highs.sort((a, b) => a - b)[Math.ceil((highs.length - 1) * 0.995)]);
    }
    if (low > high) [low, high] = least <= greatest ? [least, greatest] : [0, 1];
    this.isLog = this.log && positive && low > 0;
    this.logButton.hidden = !positive;
    if (this.isLog) {
      [low, high] = [Math.max(least, low / 30), Math.min(greatest, high * 1000)];
      const room = Math.max((high / low) ** 0.05, 1.02);
      this.y = [low / room, high * room];
    } else {
      const span = high - low || Math.abs(high) * 0.1 || 1;
      low = Math.max(least, low - span * 0.8);
      high = Math.min(greatest, high + span * 0.8);
      if (this.spec.low !== undefined && low > this.spec.low && low - this.spec.low < (high - this.spec.low) * 0.8) low = this.spec.low;
      const room = (high - low || Math.abs(high) * 0.1 || 1) * 0.05;
      this.y = [low === this.spec.low ? low : low - room, high + room];
    }
    if (this.spec.zero && !this.isLog) this.y = [Math.min(this.y[0], 0), Math.max(this.y[1], 0)];
  }

  yOf(value) {
    const [low, high] = this.y;
    const share = this.isLog ? Math.log(Math.max(value, 1e-45) / low) / Math.log(high / low) : (value - low) / (high - low);
    return this.top + this.plotHeight * (1 - clamp(share, -2, 3));
  }

  drawLine(draw, { curve, from, to, smooth, paint, dash, dots }) {
    const xs = [], count = to - from;
    for (let i = from; i < to; i++) xs.push(this.xOf(curve.mid[i]));
    draw.strokeStyle = draw.fillStyle = paint;
    draw.lineJoin = "round";
    if (curve.low !== curve.mean) {
      draw.globalAlpha = 0.16;
      draw.beginPath();
      for (let i = 0; i < count; i++) draw.lineTo(xs[i], this.yOf(curve.high[from + i]));
      for (let i = count - 1; i >= 0; i--) draw.lineTo(xs[i], this.yOf(curve.low[from + i]) + 0.5);
      draw.fill();
    }
    const stroke = (values, width, alpha) => {
      draw.globalAlpha = alpha;
      draw.lineWidth = width;
      draw.beginPath();
      for (let i = 0; i < count; i++) draw.lineTo(xs[i], this.yOf(values[from + i]));
      draw.stroke();
    };
    draw.setLineDash(dash);
    if (smooth) {
      draw.setLineDash([]);
      stroke(curve.mean, 1, 0.28);
      draw.setLineDash(dash);
    }
    stroke(smooth || curve.mean, 1.6, dots ? 0.6 : 1);
    draw.setLineDash([]);
    draw.globalAlpha = 1;
    if (dots ? count < 300 : count <= 40) {
      for (let i = 0; i < count; i++) {
        draw.beginPath();
        draw.arc(xs[i], this.yOf(curve.mean[from + i]), dots ? 2.6 : 2, 0, 7);
        draw.fill();
      }
    }
  }

  // Small triangles where values lie above or below the axis.
  drawBeyond(draw, lines) {
    for (const { curve, from, to, paint } of lines) {
      let last = [-9, -9];
      for (let i = from; i < to; i++) {
        const x = this.xOf(curve.mid[i]);
        if (x < this.left || x > this.left + this.plotWidth) continue;
        [[curve.high[i] > this.y[1], this.top + 1, 5], [curve.low[i] < this.y[0], this.top + this.plotHeight - 1, -5]].forEach(([beyond, y, size], side) => {
          if (!beyond || x - last[side] < 4) return;
          last[side] = x;
          draw.fillStyle = paint;
          draw.beginPath();
          draw.moveTo(x, y);
          draw.lineTo(x - 3, y + size);
          draw.lineTo(x + 3, y + size);
          draw.fill();
        });
      }
    }
  }

  points(draw) {
    for (const { curve, paint } of this.lines()) {
      const i = valueAt(curve, view.hover);
      if (i === null) continue;
      const x = this.xOf(curve.mid[i]), y = this.yOf(curve.mean[i]);
      if (y < this.top - 2 || y > this.top + this.plotHeight + 2) continue;
      draw.fillStyle = paint;
      draw.strokeStyle = theme.card;
      draw.lineWidth = 1.5;
      draw.beginPath();
      draw.arc(x, y, 3.5, 0, 7);
      draw.fill();
      draw.stroke();
    }
  }

  // Values in the legend: at the cursor, or the last ones.
  readout() {
    const form = forms[this.spec.form || "plain"];
    for (const { key } of this.spec.keys) {
      for (const run of visibleRuns()) {
        const curve = run.curves.get(key), chip = this.chips.get(`${key} ${run.name}`);
        if (!curve || !chip) continue;
        const i = view.hover === null ? curve.mean.length - 1 : valueAt(curve, view.hover);
        let text = i === null ? "–" : form(curve.mean[i]);
        if (i !== null && view.hover !== null && this.chips.size === 1 && curve.high[i] > curve.low[i]) text += ` (${form(curve.low[i])} … ${form(curve.high[i])})`;
        chip.textContent = text;
      }
    }
  }

  onHover(event, x, y) {
    const marks = y < this.top + this.plotHeight ? this.marksNear(x) : [];
    if (marks.length) tip(event, ...marks.map(eventLine));
    else hideTip();
  }
}

// Index of the bucket at a step, null before the first and after the last.
function valueAt(curve, step) {
  if (step === null || !curve.mid.length) return null;
  const i = nearest(curve.mid, step), count = curve.mid.length;
  const reach = count > 1 ? (curve.last[count - 1] - curve.first[0]) / (count - 1) : 1;
  return step < curve.first[0] - reach || step > curve.last[count - 1] + reach ? null : i;
}

// Mean over `span` steps around each, fewer near both ends: a falling loss is not shown too high.
function smoothed(mid, mean, span) {
  const count = mean.length, sums = new Float64Array(count + 1), out = new Float64Array(count);
  for (let i = 0; i < count; i++) sums[i + 1] = sums[i] + mean[i];
  for (let i = 0; i < count; i++) {
    const half = Math.min(span / 2, mid[i] - mid[0], mid[count - 1] - mid[i]);
    const from = firstAtLeast(mid, mid[i] - half), to = Math.max(firstAtLeast(mid, mid[i] + half + 1e-9), i + 1);
    out[i] = (sums[to] - sums[from]) / (to - from);
  }
  return out;
}

function swatch(paint, dash, dots) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("viewBox", "0 0 22 8");
  const line = document.createElementNS(space, "line");
  for (const [key, value] of Object.entries({ x1: 0, x2: 22, y1: 4, y2: 4, "stroke-width": dots ? 1 : 2.5, "stroke-dasharray": dash.join(" ") })) line.setAttribute(key, value);
  line.style.stroke = paint;
  svg.append(line);
  if (dots) {
    const dot = document.createElementNS(space, "circle");
    for (const [key, value] of Object.entries({ cx: 11, cy: 4, r: 3.2 })) dot.setAttribute(key, value);
    dot.style.fill = paint;
    svg.append(dot);
  }
  return svg;
}

function eventLine({ event, run }) {
  const { paint, sign } = kindOf(event.kind);
  const who = view.runs.length > 1 ? `${run.name}, ` : "";
  return el("p", {}, el("b", { style: { color: paint } }, `${sign} ${event.kind}`), ` ${who}step ${grouped(event.step)}: ${event.text}`);
}
