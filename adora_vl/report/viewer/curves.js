// Which curves there are, for one run or several laid over each other.

const CURVES = [
  { title: "Reward", keys: [["reward", ""]], zero: true },
  { title: "Share of answers with a working", keys: [["grading/worked", ""]], format: percent, share: true },
  { title: "Pass rate", keys: [["adora/pass_rate", ""]], format: percent, share: true },
  { title: "Accuracy in training", keys: [["grading/correct", ""]], format: percent, share: true },
  { title: "Length in tokens, right and wrong", keys: [["adora/length_correct", "right"], ["adora/length_wrong", "wrong"]] },
  { title: "Share of TDS prompts", keys: [["adora/tds_share", ""]], format: percent, share: true },
  { title: "Entropy, nats per token", keys: [["entropy", ""]], zero: true },
  { title: "Loss", keys: [["loss", ""]] },
  { title: "KL to the reference", keys: [["kl", ""]], zero: true },
  { title: "Gradient norm", keys: [["grad_norm", ""]], zero: true },
  { title: "Drift of engine and trainer, nats per token", keys: [["adora/drift", ""]], zero: true },
  { title: "Age of the rollouts in generations", keys: [["adora/staleness", ""]], zero: true, optional: true },
  { title: "Calls of tools a rollout", keys: [["tools/call_frequency", ""]], zero: true, optional: true },
  { title: "Share of calls that fail, and of rollouts that end unanswered", keys: [["tools/failure_frequency", "failed"], ["adora/unanswered_calls", "unanswered"]], format: percent, share: true, optional: true },
  { title: "Reward with a call minus without, in one group", keys: [["adora/tool_gain", ""]], optional: true },
  { title: "Seconds in tools", keys: [["adora/tools_s", ""]], zero: true, optional: true },
  { title: "Seconds waited", keys: [["adora/trainer_waited_s", "by the trainer"], ["adora/servers_waited_s", "by the servers"]], zero: true, optional: true },
];
const PHASES = ["rollout", "grading", "policy", "sync", "wake", "sleep", "other"];
const TABLE = [
  ["reward", "reward"], ["pass rate", "adora/pass_rate"], ["accuracy", "grading/correct"],
  ["TDS share", "adora/tds_share"], ["mean weight", "adora/weight_mean"],
  ["length, right", "adora/length_correct"], ["length, wrong", "adora/length_wrong"], ["entropy", "entropy"], ["KL", "kl"],
  ["gradient norm", "grad_norm"], ["drift, nats", "adora/drift"], ["seconds per step", "step_time"],
];

function pointsOf(run, key) {
  return run.metrics.filter((line) => isNumber(line[key])).map((line) => [line.step, line[key]]);
}

/** One series of each run that has the figure. */
function seriesOf(runs, keys, window) {
  return runs.flatMap((run, index) =>
    keys.map(([key, word], second) => {
      const raw = pointsOf(run, key);
      return {
        label: [runs.length > 1 || !word ? run.name : "", word].filter(Boolean).join(", "),
        css: `run${(keys.length > 2 ? second : index) % 6}`, dashed: second > 0 && keys.length < 3, points: smoothed(raw, window), raw,
      };
    }),
  ).filter(({ points }) => points.length);
}

function phaseCharts(runs) {
  return runs.map((run) => ({
    title: runs.length > 1 ? `Seconds per step, ${run.name}` : "Seconds per step",
    stack: true, format: figure,
    series: PHASES.map((phase) => ({ label: phase, css: `phase-${phase}`, points: pointsOf(run, `seconds/${phase}`) })).filter(({ points }) => points.length),
  }));
}

const VIEWS = ["image", "text", "both", "blank"];

/** They are not smoothed: some steps lie between two evaluations, so a mean over several would lag far behind. The views
 * of one run's problems stand in one chart. */
function evaluationCurves(runs) {
  const keys = new Set(runs.flatMap((run) => run.metrics.flatMap((line) => Object.keys(line).filter((key) => /^eval_.*_accuracy$/.test(key)))));
  const charts = {};
  for (const name of [...keys].sort().map((key) => key.slice(5, -9))) {
    const [base, view] = [name.replace(/_[a-z]+$/, ""), name.replace(/^.*_/, "")];
    const viewed = runs.length === 1 && VIEWS.every((each) => keys.has(`eval_${base}_${each}_accuracy`)) && VIEWS.includes(view);
    (charts[viewed ? base : name] ??= []).push([`eval_${name}_accuracy`, viewed ? view : ""]);
  }
  return Object.entries(charts).map(([title, series]) => ({ title: `Held-out accuracy, ${title}`, keys: series, format: percent, share: true, sparse: true }));
}

class Curves {
  constructor(runs, pick) {
    this.runs = runs;
    this.pick = pick;
    const shown = new Set(CURVES.flatMap(({ keys }) => keys.map(([key]) => key)));
    const every = new Set(runs.flatMap((run) => run.metrics.flatMap((line) => Object.keys(line).filter((key) => isNumber(line[key])))));
    const others = [...every].filter((key) => !shown.has(key) && key !== "step" && !key.startsWith("seconds/")).sort();
    byId("other-figure").append(el("option", { value: "" }, "none"), ...others.map((key) => el("option", { value: key }, key)));
    for (const id of ["smoothing", "other-figure"]) byId(id).addEventListener("change", () => this.show());
    this.resized = new ResizeObserver(() => this.charts.forEach((chart) => chart.draw()));
    this.resized.observe(byId("charts"));
    this.show();
    this.table();
  }

  show() {
    const window = Number(byId("smoothing").value);
    const other = byId("other-figure").value;
    const chosen = other ? [{ title: other, keys: [[other, ""]] }] : [];
    const wanted = [...chosen, ...CURVES.slice(0, 2), ...evaluationCurves(this.runs), ...CURVES.slice(2)];
    const specs = wanted.map((curve) => ({ format: figure, ...curve, series: seriesOf(this.runs, curve.keys, curve.sparse ? 1 : window) }));
    this.charts = [...specs, ...phaseCharts(this.runs)].filter(({ series }) => series.length).map((spec) => new Chart(spec, this.pick));
    byId("charts").replaceChildren(...this.charts.map((chart) => chart.node));
    const missing = specs.filter(({ series, optional }) => !series.length && !optional).map(({ title }) => title);
    if (missing.length) byId("charts").append(el("p", { class: "hint" }, `Not logged by these runs: ${missing.join("; ")}.`));
    this.charts.forEach((chart) => chart.draw());
  }

  table() {
    const rows = TABLE.map(([title, key]) => {
      const cells = this.runs.map((run) => {
        const values = pointsOf(run, key).map((point) => point[1]);
        const fifth = Math.max(1, Math.floor(values.length / 5));
        return values.length ? `${figure(mean(values.slice(0, fifth)))} → ${figure(mean(values.slice(-fifth)))}` : null;
      });
      return cells.some(Boolean) ? el("tr", {}, el("th", { scope: "row" }, title), cells.map((cell) => el("td", {}, cell || "–"))) : null;
    });
    byId("figures").append(
      el("caption", {}, "Mean over the first and the last fifth of the logged steps"),
      el("thead", {}, el("tr", {}, el("td"), this.runs.map((run) => el("th", { scope: "col" }, run.name)))),
      el("tbody", {}, rows.filter(Boolean)),
    );
  }
}
