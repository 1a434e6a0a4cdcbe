// One chart: lines over steps, or phases stacked; read by pointer and by keyboard.

const MARGIN = { top: 10, right: 12, bottom: 26, left: 48 };
const HEIGHT = 210;

function niceTicks(low, high, count) {
  if (!(high > low)) {
    const room = Math.abs(high) * 0.5;
    low -= room;
    high += room || 1; // a figure that is 0 throughout has its line at the bottom
  }
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); i * step < high + step * 0.999; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function smoothed(points, window) {
  if (window <= 1) return points;
  return points.map(([step], index) => {
    const near = points.slice(Math.max(0, index - window + 1), index + 1);
    return [step, mean(near.map((point) => point[1]))];
  });
}

/** Each series on top of the one before: [step, bottom, top]. */
function stacked(series) {
  const bottoms = new Map();
  return series.map(({ points }) =>
    points.map(([step, value]) => {
      const bottom = bottoms.get(step) || 0;
      bottoms.set(step, bottom + value);
      return [step, bottom, bottom + value];
    }),
  );
}

function summaryOf(spec) {
  const said = spec.series.map(({ label, points, raw }) => {
    const first = (raw || points)[0], last = (raw || points)[points.length - 1];
    return `${label}: ${spec.format(first[1])} at step ${first[0]}, ${spec.format(last[1])} at step ${last[0]}`;
  });
  return `${spec.title}. ${said.join("; ")}.`;
}

class Chart {
  /** spec: {title, how, series: [{label, css, dashed, points: [[step, value]], raw}], stack, format, zero, share}; pick:
   * called with a step. `how` says how to read the chart. A single line needs no legend. `raw` is what was logged, where `points` are smoothed: it is drawn faintly, and read. The axis of a
   * `zero` chart begins at 0, that of a `share` goes from 0 to 100 %. */
  constructor(spec, pick) {
    this.spec = spec;
    this.pick = pick;
    this.cursor = null;
    this.steps = [...new Set(spec.series.flatMap(({ points }) => points.map((point) => point[0])))].sort((a, b) => a - b);
    this.box = el("div", {
      class: "plot", tabindex: "0", role: "img", "aria-label": summaryOf(spec),
      onpointermove: (event) => this.point(event), onpointerleave: () => this.read(null),
      onclick: (event) => { this.point(event); this.choose(); }, onkeydown: (event) => this.key(event),
      onblur: () => this.read(null),
    });
    this.output = el("p", { class: "reading", "aria-live": "polite" });
    const legend = spec.series.map(({ label, css, dashed }) =>
      el("li", {}, el("span", { class: `swatch ${css}${dashed ? " dashed" : ""}`, "aria-hidden": "true" }), label),
    );
    this.node = el("figure", {}, el("figcaption", {}, spec.title), this.box,
      spec.series.length > 1 ? el("ul", { class: "legend" }, legend) : null,
      spec.how ? el("p", { class: "how" }, spec.how) : null, this.output);
  }

  draw() {
    const width = Math.max(240, this.box.clientWidth);
    if (width === this.width) return;
    this.width = width;
    const { stack, zero, share, format } = this.spec;
    const layers = stack ? stacked(this.spec.series) : null;
    const values = (layers ? layers.flat().map((point) => point[2]) : this.spec.series.flatMap(({ points, raw }) => (raw || points).map((point) => point[1])));
    const ticks = share ? niceTicks(0, 1, 5) : niceTicks(stack || zero ? Math.min(0, ...values) : lowest(values), highest(values), 4);
    const bottom = ticks[0], top = ticks[ticks.length - 1];
    const first = this.steps[0], last = this.steps[this.steps.length - 1];
    const right = width - MARGIN.right, floor = HEIGHT - MARGIN.bottom;
    this.x = (step) => (last === first ? (MARGIN.left + right) / 2 : MARGIN.left + ((step - first) / (last - first)) * (right - MARGIN.left));
    this.y = (value) => floor - ((value - bottom) / (top - bottom)) * (floor - MARGIN.top);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" });
    for (const tick of ticks) {
      picture.append(
        svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: this.y(tick), y2: this.y(tick) }),
        svg("text", { class: "tick", x: MARGIN.left - 6, y: this.y(tick) + 4, "text-anchor": "end" }, format(tick)),
      );
    }
    for (const step of this.labelled(width)) {
      picture.append(svg("text", { class: "tick", x: this.x(step), y: HEIGHT - 8, "text-anchor": "middle" }, String(step)));
    }
    this.spec.series.forEach((series, index) => picture.append(...(layers ? this.area(series, layers[index]) : this.line(series))));
    this.rule = svg("line", { class: "rule", x1: 0, x2: 0, y1: MARGIN.top, y2: floor, visibility: "hidden" });
    picture.append(this.rule);
    setChildren(this.box, picture);
  }

  /** The first and the last step, and round ones between that leave room. */
  labelled(width) {
    const first = this.steps[0], last = this.steps[this.steps.length - 1];
    const round = niceTicks(first, last, Math.max(3, Math.floor(width / 80))).filter((step) => step > first && step < last && Number.isInteger(step));
    const kept = first === last ? [first] : [first, last];
    for (const step of round) if (kept.every((other) => Math.abs(this.x(other) - this.x(step)) > 40)) kept.push(step);
    return kept;
  }

  path(points) {
    return points.map(([step, value], i) => `${i ? "L" : "M"}${this.x(step).toFixed(1)} ${this.y(value).toFixed(1)}`).join("");
  }

  line({ css, dashed, points, raw }) {
    const faint = raw && raw !== points ? [svg("path", { class: `line faint ${css}`, d: this.path(raw) })] : [];
    const dots = points.length <= 30 ? points.map(([step, value]) => svg("circle", { class: css, cx: this.x(step), cy: this.y(value), r: 2.5 })) : [];
    return [...faint, svg("path", { class: `line ${css}${dashed ? " dashed" : ""}`, d: this.path(points) }), ...dots];
  }

  area({ css }, layer) {
    const points = layer.length === 1 ? this.widened(layer[0]) : layer.map(([step, low, high]) => [this.x(step), low, high]);
    const there = points.map(([x, , high]) => `${x.toFixed(1)} ${this.y(high).toFixed(1)}`);
    const back = points.map(([x, low]) => `${x.toFixed(1)} ${this.y(low).toFixed(1)}`).reverse();
    return [svg("path", { class: `area ${css}`, d: `M${[...there, ...back].join("L")}Z` })];
  }

  widened([step, low, high]) {
    return [[this.x(step) - 8, low, high], [this.x(step) + 8, low, high]];
  }

  point(event) {
    const x = event.clientX - this.box.getBoundingClientRect().left;
    let near = this.steps[0];
    for (const step of this.steps) if (Math.abs(this.x(step) - x) < Math.abs(this.x(near) - x)) near = step;
    this.read(near);
  }

  key(event) {
    const at = this.steps.indexOf(this.cursor);
    const last = this.steps.length - 1;
    const to = { ArrowRight: Math.min(last, at + 1), ArrowLeft: at < 0 ? last : Math.max(0, at - 1), Home: 0, End: last }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      this.read(this.steps[to]);
    } else if (event.key === "Enter") this.choose();
  }

  choose() {
    if (this.cursor !== null) this.pick(this.cursor);
  }

  read(step) {
    this.cursor = step;
    this.rule.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step === null) {
      this.output.textContent = "";
      return;
    }
    this.rule.setAttribute("x1", this.x(step));
    this.rule.setAttribute("x2", this.x(step));
    const values = this.spec.series.map(({ label, points, raw }) => {
      const found = (raw || points).find((point) => point[0] === step);
      return found ? `${label} ${this.spec.format(found[1])}` : null;
    });
    this.output.textContent = `step ${step}: ${values.filter(Boolean).join(", ")}`;
  }
}

function lowest(values) {
  return values.reduce((least, value) => Math.min(least, value), Infinity);
}

function highest(values) {
  return values.reduce((most, value) => Math.max(most, value), -Infinity);
}
