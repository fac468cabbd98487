// Lists: the tensors that stand out, and the events.

const TENSOR_COLUMNS = [["saturated", "saturated", "share"], ["underflown", "underflown", "share"], ["error", "error of the cast", "share"], ["scale", "scale", "plain"], ["amax", "amax", "plain"]];

class TensorTable extends Panel {
  // The tensors with the largest last values of one column; a click on a head chooses the column, another turns the order.
  constructor(spec) {
    super(spec);
    this.by = null;
    this.down = true;
    this.box = el("div", { class: "scroll" });
    this.stage.replaceWith(this.box);
  }
  listen() {}
  cursor() {}

  render() {
    this.stale = false;
    const runs = visibleRuns().filter((run) => TENSOR_COLUMNS.some(([key]) => run.latest[key]));
    if (!runs.length) return;
    this.run = runs.find((run) => this.run && run.name === this.run.name) || runs[0];
    const there = TENSOR_COLUMNS.filter(([key]) => this.run.latest[key]);
    if (!there.some(([key]) => key === this.by)) this.by = there[0][0];
    this.tools.replaceChildren(runs.length > 1 ? select("run", runs.map((run) => [run.name, run.name]), this.run.name, (name) => { this.run = runs.find((run) => run.name === name); this.render(); }) : "");
    const value = (key, i) => this.run.latest[key].values[i], sign = this.down ? -1 : 1;
    const order = this.run.rows.fp8.map((_, i) => i).filter((i) => isNumber(value(this.by, i))).sort((a, b) => sign * (value(this.by, a) - value(this.by, b)));
    const head = there.map(([key, label]) => {
      const choose = () => { this.down = this.by === key ? !this.down : true; this.by = key; this.render(); };
      const button = el("button", { onclick: choose, title: `at step ${grouped(this.run.latest[key].step)}` }, `${label}${this.by === key ? (this.down ? " ▾" : " ▴") : ""}`);
      return el("th", { class: "number", "aria-sort": this.by === key ? (this.down ? "descending" : "ascending") : null }, button);
    });
    const rows = order.slice(0, 12).map((i) => el("tr", {}, el("td", { class: "label" }, this.run.rows.fp8[i]), ...there.map(([key, , form]) => el("td", { class: "number" }, forms[form](value(key, i))))));
    this.box.replaceChildren(el("table", { class: "list" }, el("thead", {}, el("tr", {}, el("th", {}, "tensor"), ...head)), el("tbody", {}, ...rows)));
  }
}

// Events of the kinds that are shown, the last ones first; a click goes to where it was.
let eventWords = "";
function drawEvents() {
  const all = visibleRuns().flatMap((run) => run.events.map((event) => ({ run, event })));
  if (!view.runs.some((run) => run.events.length)) return;
  const body = el("tbody"), several = view.runs.length > 1, count = el("small");
  const fill = () => {
    const words = eventWords.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = ({ run, event }) => view.shownKinds.has(event.kind) && words.every((word) => `${event.kind} ${event.step} ${event.named || ""} ${event.text} ${run.name}`.toLowerCase().includes(word));
    const found = all.filter(fits).sort((a, b) => b.event.step - a.event.step || (a.event.time < b.event.time ? 1 : -1));
    count.textContent = `${grouped(found.length)} of ${grouped(all.length)}`;
    body.replaceChildren(...found.slice(0, 300).map(({ run, event }) => {
      const { sign, paint } = kindOf(event.kind), span = Math.max((view.full[1] - view.full[0]) * 0.04, 20);
      return el("tr", { class: "go", title: "show these steps", onclick: () => { zoom(event.step - span, event.step + span); hover(event.step); } },
        el("td", { class: "number" }, grouped(event.step)),
        el("td", {}, el("span", { class: "label" }, el("span", { style: { color: paint } }, sign), ` ${event.kind}`), several ? el("small", {}, ` ${run.name}`) : ""),
        el("td", {}, event.text, event.named ? el("small", {}, ` ${event.named}`) : ""),
        el("td", { class: "hide-small" }, el("small", {}, event.time.replace("T", " ").slice(0, 19))));
    }));
  };
  const box = el("input", { class: "tool", type: "search", placeholder: "filter events", "aria-label": "filter events", value: eventWords });
  box.addEventListener("input", () => { eventWords = box.value; fill(); });
  fill();
  const head = el("thead", {}, el("tr", {}, el("th", { class: "number" }, "step"), el("th", {}, "kind"), el("th", {}, "what happened"), el("th", { class: "hide-small" }, "time (UTC)")));
  SECTIONS.events.replaceChildren(el("h2", {}, "Events"), el("div", { class: "card" }, el("div", { class: "top" }, count, box), el("div", { class: "scroll" }, el("table", { class: "list" }, head, body))));
}
