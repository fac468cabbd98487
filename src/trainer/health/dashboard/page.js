// The page: what is read from the data, which charts there are, the head, the events, and what is asked of a live server.

const KINDS = {
  nonfinite: ["✕", "--s1"], spike: ["▲", "--s4"], loss_scale: ["▿", "--s4"], rollback: ["◀", "--s3"], alert: ["◆", "--s1"], checkpoint: ["●", "--s7"], resume: ["▶", "--s0"],
  throttle: ["▼", "--s5"], power: ["▽", "--s5"], signal: ["■", "--s6"], data: ["◇", "--s2"], failure: ["✖", "--bad"],
};
const QUIET_KINDS = ["checkpoint", "profile"]; // at first not on the charts
const kindOf = (kind) => {
  const [sign, name] = KINDS[kind] || ["○", "--s6"];
  return { sign, paint: getComputedStyle(document.documentElement).getPropertyValue(name).trim() };
};
const line = (title, unit, keys, more = {}) => ({ title, unit, keys: keys.map(([key, label, dots]) => ({ key, label, dots })), type: LinePanel, ...more });

const SECTIONS = [
  ["Loss and optimizer", [
    line("Loss", "nats per token", [["loss/lm", "language model"], ["loss/validation", "validation", true], ["loss/total", "total"], ["loss/mtp", "MTP"]], { size: "wide", form: "loss", primary: ["loss/lm", "loss/validation"] }),
    line("Gap to the first run", "loss above it, %", [["gap/training", "training, smoothed"], ["gap/validation", "validation", true]], { form: "percent", zero: true, exact: true }),
    line("Gradient norm", "", [["optim/grad_norm", "before clipping"]], { log: true, exact: true }),
    line("Parameter norm", "", [["optim/param_norm", "all parameters"]], { exact: true }),
    line("Update ratio", "update over parameters", [["optim/update_ratio", "norms"]], { log: true }),
    line("Learning rate", "", [["optim/lr", "learning rate"]], { exact: true, low: 0 }),
    line("Loss scale", "FP16", [["optim/loss_scale", "loss scale"]], { log: true, exact: true }),
    line("Skipped steps", "so far", [["recovery/skipped_steps", "skipped"], ["recovery/spikes", "of these spikes"], ["recovery/loss_scale_skips", "of these by the loss scale"], ["recovery/rewinds", "rewinds"], ["data/skipped_shards", "data files left out"]], { exact: true, low: 0, unlessZero: true }),
  ]],
  ["FP8", [
    { title: "Scales and casts", unit: "one row a tensor", type: MapPanel, group: "fp8", size: "all", filters: [["inputs", ":input"], ["weights", ":weight"], ["gradients", ":grad"], ["all", ""]],
      quantities: [
        { id: "change", key: "fp8/scale", label: "scale against its median", mode: "change" },
        { id: "scale", key: "fp8/scale", label: "scale", mode: "log" },
        { id: "amax", key: "fp8/amax", label: "amax", mode: "log" },
        { id: "saturated", key: "fp8/saturated", label: "saturated", mode: "log", form: "share" },
        { id: "underflown", key: "fp8/underflown", label: "underflown", mode: "linear", form: "share" },
        { id: "error", key: "fp8/error", label: "error of the cast", mode: "linear", form: "share" },
      ] },
    line("Saturated and underflown", "share of a tensor, at worst", [["fp8/saturated_worst", "saturated"], ["fp8/underflown_worst", "underflown"]], { form: "share", low: 0, exact: true }),
    line("Error of the cast", "relative", [["fp8/error_worst", "worst tensor"], ["fp8/error_mean", "mean"]], { form: "share", exact: true }),
    line("Range of scales", "", [["fp8/scale_max", "largest"], ["fp8/scale_min", "smallest"]], { log: true, exact: true }),
    line("Largest amax", "", [["fp8/amax_max", "of all tensors"]], { log: true, exact: true }),
    { title: "Tensors to look at", unit: "last values", type: TensorTable, size: "all" },
  ]],
  ["BF16 shadow", [
    line("Loss gap to BF16", "nats per token, same weights", [["shadow/loss_gap", "this precision minus BF16"]], { zero: true, exact: true }),
    line("Gradient cosine to BF16", "", [["shadow/cosine_mean", "mean of modules"], ["shadow/cosine_worst", "worst module"]], { exact: true }),
    { title: "Gradient cosine by module", type: MapPanel, group: "shadow", quantities: [{ id: "cosine", key: "shadow/cosine", label: "cosine", mode: "linear" }] },
  ]],
  ["Activations", [
    line("Kurtosis", "largest over blocks", [["act/kurtosis_qkv", "QKV output"], ["act/kurtosis_ffn", "input of the FFN's second linear"], ["act/kurtosis_block", "block output"]], { log: true, exact: true }),
    { title: "Kurtosis by block", type: MapPanel, group: "blocks", size: "wide", quantities: [
      { id: "qkv", key: "blocks/kurtosis_qkv", label: "QKV output", mode: "log" }, { id: "ffn", key: "blocks/kurtosis_ffn", label: "FFN's second linear", mode: "log" },
      { id: "block", key: "blocks/kurtosis_block", label: "block output", mode: "log" }] },
    line("Largest attention logit", "bound from the log-sum-exp", [["act/max_logit", "all blocks"]], { exact: true, low: 0 }),
    line("Heads clipped", "QK-clip, in the step", [["optim/qk_clipped_heads", "heads"]], { exact: true, low: 0, unlessZero: true }),
    { title: "Largest logit by block", type: MapPanel, group: "blocks", size: "wide", quantities: [{ id: "logit", key: "blocks/max_logit", label: "logit", mode: "linear" }] },
  ]],
  ["Experts", [
    line("Load, largest over mean", "", [["moe/load_max_over_mean", "mean of blocks"], ["moe/load_max_over_mean_worst", "worst block"]], { log: true }),
    line("Entropy of the load", "1 = even", [["moe/entropy", "mean of blocks"], ["moe/entropy_worst", "worst block"]]),
    line("Balance loss", "nats per token", [["loss/balance", "balance"]], { unlessZero: true }),
    line("Router bias", "largest", [["moe/bias_max", "of all experts"]], { exact: true, low: 0 }),
    { title: "Experts by block", type: MapPanel, group: "moe", size: "wide", quantities: [
      { id: "load", key: "moe/load_max_over_mean", label: "load, largest over mean", mode: "log" }, { id: "entropy", key: "moe/entropy", label: "entropy", mode: "linear" },
      { id: "bias", key: "moe/bias_max", label: "largest bias", mode: "linear" }] },
    { title: "Load by expert", type: LoadPanel, keyless: true },
  ]],
  ["Speed and memory", [
    line("Throughput", "tokens per second", [["perf/tokens_per_second", "tokens/s"]], {}),
    line("MFU", "of the BF16 peak", [["perf/mfu", "MFU"]], { form: "share" }),
    line("Bubble", "of a step's passes, mean of the ranks", [["perf/bubble", "measured"], ["perf/bubble_forecast", "forecast"]], { form: "share", low: 0 }),
    line("Stragglers", "slowest rank, above the others' median", [["ranks/gpu_slowness", "its GPU"], ["ranks/data_wait", "its data, of a step"]], { form: "share", low: 0 }),
    line("Model FLOPs", "TFLOP/s a device, recomputation not counted", [["perf/tflops_per_gpu", "TFLOP/s"]]),
    line("Time of a step", "seconds", [["perf/step_seconds", "step"]]),
    line("Memory", "GiB", [["memory/peak_gib", "peak"], ["memory/allocated_gib", "now"]], { exact: true }),
  ]],
  ["Power and heat", [
    line("Power", "watts, all GPUs", [["gpu/power_watts", "power"]]),
    line("Energy", "joules per token", [["gpu/joules_per_token", "per token"]]),
    line("Energy of a step", "joules", [["gpu/joules_per_step", "per step"]]),
    line("Temperature", "°C, hottest GPU", [["gpu/temperature_c", "core"], ["gpu/memory_temperature_c", "memory"]], { exact: true }),
    line("Clock", "MHz, slowest GPU", [["gpu/clock_mhz", "cores"], ["gpu/memory_clock_mhz", "memory"]], { exact: true }),
    line("Throttled", "share of the time, worst GPU", [["gpu/throttled_share", "for any reason"], ["gpu/throttled_power_cap", "power limit"], ["gpu/throttled_thermal", "heat"], ["gpu/throttled_hardware", "hardware"]], { form: "share", low: 0, exact: true, primary: ["gpu/throttled_share"] }),
    line("Tokens lost to lower clocks", "since the line before, at most", [["gpu/tokens_lost", "tokens"]], { low: 0, exact: true, unlessZero: true }),
    line("Memory errors", "that ECC could not correct", [["gpu/ecc_errors", "errors"]], { low: 0, exact: true, unlessZero: true }),
  ]],
];

// Data ------------------------------------------------------------------------------------------------------------------

function places({ x, w }) {
  let at = 0;
  const first = x.map((step) => (at += step));
  return { first, last: w ? first.map((step, i) => step + w[i]) : first };
}

function readCurves(groups) {
  const curves = new Map();
  for (const group of groups) {
    const { first, last } = places(group), mid = first.map((step, i) => (step + last[i]) / 2);
    for (const [key, [mean, low = mean, high = mean]] of Object.entries(group.k)) curves.set(key, { first, last, mid, mean, low, high });
  }
  return curves;
}

function readGrid(data) {
  const codes = new Uint16Array(Uint8Array.from(atob(data.cells), (one) => one.charCodeAt(0)).buffer);
  const value = data.code === "log"
    ? (code) => (code === 0 ? NaN : code === 1 ? 0 : 2 ** ((code - 32768) / 256))
    : (code) => (code === 0 ? NaN : data.low + ((code - 2) / 65533) * (data.high - data.low));
  const columns = data.x.map((_, i) => Float32Array.from(codes.subarray(i * data.rows, (i + 1) * data.rows), value));
  return { ...places(data), columns };
}

function take(data) {
  view.runs = data.runs.map((one, index) => {
    for (const { kind } of one.events) if (!seenKinds.has(kind)) seenKinds.add(kind), QUIET_KINDS.includes(kind) || view.shownKinds.add(kind);
    const grids = new Map(Object.entries(one.grids).map(([key, grid]) => [key, readGrid(grid)]));
    return { ...one, index, curves: readCurves([...one.curves, ...one.gaps]), grids };
  });
  let low = Infinity, high = -Infinity;
  for (const run of view.runs) for (const { first, last } of [...run.curves.values(), ...run.grids.values()]) {
    low = Math.min(low, first[0]);
    high = Math.max(high, last[last.length - 1]);
  }
  view.full = low < high ? [low, high] : low === high ? [low - 1, low + 1] : [0, 1];
  view.remark = data.remark;
  view.differences = data.differences;
  view.time = data.time;
}
const seenKinds = new Set();

// Head ------------------------------------------------------------------------------------------------------------------

function drawHead() {
  const first = view.runs[0], several = view.runs.length > 1;
  const columns = [
    ["recipe", ({ recipe }) => recipe], ["state", (about) => stateOf(about), "left wide"],
    ["steps", (about) => [`${grouped(about.step)}${about.goal && about.goal !== about.step ? ` of ${grouped(about.goal)}` : ""}`, about.goal ? el("span", { class: "progress" }, el("i", { style: { width: `${clamp((100 * about.step) / about.goal, 0, 100)}%` } })) : ""]],
    ["tokens", ({ tokens }) => tokens && short(tokens, 3)], ["loss, last 50 steps", ({ loss }) => isNumber(loss) && forms.loss(loss)], ["validation", ({ validation }) => isNumber(validation) && forms.loss(validation)],
    ["loss vs first run", (about, run) => run !== first && gapOf(run)],
    ["tokens/s", (about) => about.tokens_per_second && short(about.tokens_per_second, 3)], ["MFU", ({ mfu }) => isNumber(mfu) && forms.share(mfu)], ["peak GiB", ({ peak_gib }) => isNumber(peak_gib) && short(peak_gib, 3)],
    ["J/token", (about) => about.joules_per_token && short(about.joules_per_token, 3)], ["skipped", ({ skipped }) => isNumber(skipped) && grouped(skipped)], ["alerts", ({ alerts }) => grouped(alerts)],
  ];
  const cells = columns.map(([label, value, kind]) => [label, kind || "", view.runs.map((run) => value(run.about, run))]).filter(([, , values]) => values.some((value) => value && (!Array.isArray(value) || value[0])));
  const head = el("tr", {}, el("th", { class: "left" }, "run"), ...cells.map(([label, kind]) => el("th", { class: kind }, label)));
  const rows = view.runs.map((run, i) => el("tr", {},
    el("td", { class: "left name", title: run.about.path }, several ? el("i", { class: "dot", style: { background: `var(--s${i % 8})` } }) : "", run.name, el("small", {}, [run.about.model, run.about.machine, isNumber(run.about.seed) ? `seed ${run.about.seed}` : ""].filter(Boolean).join(" · "))),
    ...cells.map(([label, kind, values]) => el("td", { class: kind, "data-label": label }, ...[values[i]].flat().map((one) => (one === false || one === null || one === undefined ? "" : one)))),
  ));
  const made = new Date(view.time * 1000).toISOString().slice(0, 16).replace("T", " ");
  document.getElementById("head").replaceChildren(
    el("h1", {}, several ? `${view.runs.length} runs` : first.name),
    el("p", { class: "sub" }, "Octet training run", several ? "s" : "", document.body.dataset.live === "true" ? "" : `, as of ${made} UTC`),
    el("table", { class: "runs" }, el("thead", {}, head), el("tbody", {}, ...rows)),
    view.remark ? el("p", { class: "remark" }, view.remark) : "",
    several && view.differences ? differences() : "",
  );
}

// The config keys in which the runs differ, one column a run.
function differences() {
  const { length } = view.differences, open = document.querySelector("#head details")?.open ?? length <= 12;
  if (!length) return el("p", { class: "sub" }, "The configs of these runs do not differ.");
  const head = el("tr", {}, el("th", {}, "key"), ...view.runs.map((run, i) => el("th", {}, el("i", { class: "dot", style: { background: `var(--s${i % 8})` } }), run.name)));
  const rows = view.differences.map(([key, values]) => el("tr", {}, el("td", { class: "key" }, ...key.split(/(?<=[._])/).flatMap((part) => [part, el("wbr")])), ...values.map((value) => el("td", {}, value === "" ? el("small", {}, "not set") : value))));
  return el("details", { class: "differences", open: open || null }, el("summary", {}, `${length} config ${length === 1 ? "key differs" : "keys differ"}`), el("div", { class: "card scroll" }, el("table", { class: "list" }, el("thead", {}, head), el("tbody", {}, ...rows))));
}

// In the last validation that both have had, else in the training loss.
function gapOf(run) {
  const curve = run.curves.get("gap/validation") || run.curves.get("gap/training");
  return curve ? forms.percent(curve.mean[curve.mean.length - 1]) : null;
}

function stateOf({ state, state_text }) {
  const signs = { running: "▶", finished: "✓", stopped: "■", failed: "✖", silent: "…", waiting: "…", gone: "?" };
  return el("span", { class: `state ${state}`, title: state_text }, `${signs[state] || ""} ${state}`, state_text ? el("span", { class: "why" }, state_text) : "");
}

// Bar -------------------------------------------------------------------------------------------------------------------

function drawBar() {
  const range = el("span", { class: "range" }), all = el("button", { class: "tool", onclick: () => zoom() }, "show all");
  const update = () => {
    const [low, high] = shown(), run = view.runs[0], step = view.hover;
    const tokens = step !== null && run.curves.has("tokens") ? ` · ${short(tokensAt(run.curves.get("tokens"), step), 3)} tokens` : "";
    range.textContent = step !== null ? `step ${grouped(step)}${tokens}` : `steps ${grouped(Math.max(low, 0))} – ${grouped(high)}`;
    all.hidden = view.range === null;
  };
  view.onChange = [update];
  const toggle = (pressed, title, action, ...inside) => el("button", { class: "chip", "aria-pressed": String(pressed), title, onclick: action }, ...inside);
  const runs = view.runs.length < 2 ? [] : view.runs.map((run, i) => toggle(!view.hiddenRuns.has(run.name), "show or hide this run", () => {
    view.hiddenRuns.has(run.name) ? view.hiddenRuns.delete(run.name) : view.hiddenRuns.add(run.name);
    drawBar(), drawEvents(), redraw();
  }, el("i", { class: "dot", style: { background: `var(--s${i % 8})`, margin: "0" } }), run.name));
  const counts = {};
  for (const run of view.runs) for (const { kind } of run.events) counts[kind] = (counts[kind] || 0) + 1;
  const order = (kind) => (kind in KINDS ? Object.keys(KINDS).indexOf(kind) : 99);
  const kinds = Object.keys(counts).sort((a, b) => order(a) - order(b)).map((kind) => {
    const { sign, paint } = kindOf(kind);
    return toggle(view.shownKinds.has(kind), `show or hide ${kind} on charts and in the list`, () => {
      view.shownKinds.has(kind) ? view.shownKinds.delete(kind) : view.shownKinds.add(kind);
      drawBar(), drawEvents(), redraw();
    }, el("span", { style: { color: paint } }, sign), kind, el("small", {}, grouped(counts[kind])));
  });
  const smooth = select("smoothing", [["0", "not smoothed"], ["0.01", "smooth 1 %"], ["0.03", "smooth 3 %"], ["0.1", "smooth 10 %"]], String(view.smooth), (value) => { view.smooth = Number(value); redraw(); });
  document.getElementById("bar").replaceChildren(el("div", {}, range, all, smooth, ...runs, el("span", { class: "grow" }), ...kinds, view.status || ""));
  update();
}

// Tokens up to a step: between two lines evenly, since phases change how many a step has.
function tokensAt({ mid, mean }, step) {
  const i = Math.min(firstAtLeast(mid, step), mid.length - 1), [from, before] = i ? [mid[i - 1], mean[i - 1]] : [0, 0];
  return before + (mean[i] - before) * clamp((step - from) / (mid[i] - from), 0, 1);
}

// Charts ----------------------------------------------------------------------------------------------------------------

function wanted(spec) {
  if (spec.type === LoadPanel) return view.runs.some((run) => run.load && run.load.tokens.length);
  if (spec.type === TensorTable) return view.runs.some((run) => TENSOR_COLUMNS.some(([key]) => run.latest[key]));
  if (spec.type === MapPanel) return spec.quantities.some(({ key }) => view.runs.some((run) => run.grids.has(key)));
  const there = spec.keys.flatMap(({ key }) => view.runs.map((run) => run.curves.get(key)).filter(Boolean));
  return there.length > 0 && !(spec.unlessZero && there.every(({ high }) => high.every((value) => value === 0)));
}

function drawCharts() {
  const main = document.getElementById("main"), known = new Set(["tokens", ...SECTIONS.flatMap(([, specs]) => specs.flatMap((spec) => (spec.keys || []).map(({ key }) => key)))]);
  if (!main.firstChild) {
    for (const section of SECTIONS) {
      section.grid = el("div", { class: "grid" });
      grids.observe(section.grid);
      section.box = el("section", { hidden: true }, el("h2", {}, section[0]), section.grid);
      main.append(section.box);
    }
    SECTIONS.events = el("section");
    SECTIONS.other = el("div", { class: "grid" });
    grids.observe(SECTIONS.other);
    SECTIONS.others = el("details", { hidden: true }, el("summary", {}, "Other metrics"), SECTIONS.other);
    main.append(SECTIONS.events, SECTIONS.others);
  }
  for (const section of SECTIONS) {
    section[1].forEach((spec, order) => {
      if (spec.panel || !wanted(spec)) return;
      place(spec, section.grid, order);
      section.box.hidden = false;
    });
  }
  const others = [...new Set(view.runs.flatMap((run) => [...run.curves.keys()]))].filter((key) => !known.has(key) && !extra.has(key)).sort();
  for (const key of others) {
    extra.add(key);
    place(line(key, "", [[key, key]]), SECTIONS.other, 0);
    SECTIONS.others.hidden = false;
  }
}
const extra = new Set();

// Cards share a row evenly, and no row is half empty: as many in each as it takes for the number of rows.
function balance(grid) {
  const columns = Math.max(1, Math.floor((grid.clientWidth + 12) / 422)), wide = Math.min(2, columns);
  const cards = [...grid.children].sort((a, b) => a.style.order - b.style.order);
  let units = 0, most = 1;
  const close = () => { most = Math.max(most, Math.ceil(units / Math.ceil(units / columns || 1))); units = 0; };
  for (const card of cards) card.classList.contains("all") ? close() : (units += card.classList.contains("wide") ? wide : 1);
  close();
  grid.style.setProperty("--columns", Math.min(most, columns));
  grid.style.setProperty("--wide", wide);
}
const grids = new ResizeObserver((entries) => entries.forEach(({ target }) => balance(target)));

function place(spec, grid, order) {
  spec.panel = new spec.type(spec);
  spec.panel.element.style.order = order;
  view.panels.push(spec.panel);
  grid.append(spec.panel.element);
  balance(grid);
}

// Live ------------------------------------------------------------------------------------------------------------------

async function poll(token) {
  const status = view.status;
  for (;;) {
    await new Promise((done) => setTimeout(done, view.pause));
    if (document.hidden) continue;
    try {
      const answer = await fetch(`data?since=${encodeURIComponent(token)}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const data = await answer.json();
      status.className = "live";
      status.textContent = "● live";
      if (data.token === token) continue;
      token = data.token;
      const count = () => view.runs.reduce((sum, run) => sum + run.events.length, 0), events = count();
      take(data);
      drawHead();
      if (count() !== events) drawBar(), drawEvents();
      drawCharts();
      redraw();
    } catch (error) {
      status.className = "live lost";
      status.textContent = "○ no answer from the server, trying again";
    }
  }
}

const data = JSON.parse(document.getElementById("data").textContent);
readTheme();
if (document.body.dataset.live === "true") view.status = el("span", { class: "live" }, "● live");
take(data);
drawHead();
drawBar();
drawCharts();
drawEvents();
redraw();
const strides = view.runs.filter((run) => run.about.stride > 1).map((run) => `of ${run.name} one line in ${run.about.stride} of tensors.jsonl was read`);
document.getElementById("foot").append(["Drag to zoom, double-click for all steps; with fingers: touch to read, pinch to zoom. Where steps are put together, the line is their mean and the band goes from the least to the greatest value.", ...strides].join(" "));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); drawBar(), drawEvents(); redraw(); });
addEventListener("keydown", (event) => { if (event.key === "Escape") zoom(); });
if (view.status) poll(data.token);
