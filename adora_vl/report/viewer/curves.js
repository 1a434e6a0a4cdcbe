// The curves, for one run or several laid over each other. Which there are is in the page's data, from record/shown_metrics.py.

// How to read each chart, by the first of its figures.
const HOW = {
  reward: "The mean over the answers of a step. It should rise; a flat line says that nothing is learned.",
  "grading/worked": "Answers that show steps before the result. Near 0 % the model guesses.",
  "steps/new": "Answers with a claim on their figure that is true and new, and right answers that err or say nothing: right by luck.",
  "adora/pass_rate": "Answers whose reward counts as right. At 0 % and at 100 % there is nothing to compare, so nothing to learn.",
  "grading/correct": "Answers that the grader calls right. If the reward rises and this does not, the reward is being gamed.",
  "adora/length_correct": "If right answers are the longer ones, working a problem out pays; if wrong ones are, guessing does.",
  "adora/tds_share": "Groups whose right answers are not longer than the wrong ones. Near 100 % the answers have settled.",
  entropy: "How undecided the model is at each token. At 0 all answers are alike, and learning ends.",
  loss: "Its height says little: in GRPO it is near 0 by construction. Look for jumps.",
  kl: "How far the model has moved away from its reference. A steep rise is a warning.",
  grad_norm: "The size of the update before it is clipped. Single peaks are harmless, a rising line is not.",
  "adora/drift": "How far engine and trainer disagree about the same token. It should be small and flat.",
  "adora/staleness": "How many generations ago the weights were made that sampled the answers.",
  "tools/call_frequency": "Calls in an answer. A fall to 0 says that the model has given up its tools.",
  "tools/failure_frequency": "Calls that were answered with an error, and answers that ended with a call.",
  "adora/tool_gain": "Above 0, answers with a call earn more than the others to the same problem.",
  "adora/tools_s": "Time spent in tools in a generation.",
  "adora/trainer_waited_s": "Who waits has too much hardware: a waiting trainer needs faster servers, and the other way round.",
};
const HOW_PHASES = "Where the time of a step goes: rollout is sampling, policy is the update.";
const HOW_EVALUATION = "Problems that are not trained on. Judge the run by this curve.";
const PHASES = ["rollout", "grading", "policy", "sync", "wake", "sleep", "other", "evaluation"];

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

/** Whether two charts would show the same lines. */
function sameLines(one, other) {
  const lines = (spec) => JSON.stringify(spec.series.map(({ raw }) => raw));
  return lines(one) === lines(other);
}

function phaseCharts(runs) {
  return runs.map((run, index) => ({
    how: index ? `The same for ${run.name}.` : HOW_PHASES,
    title: runs.length > 1 ? `Seconds per step, ${run.name}` : "Seconds per step",
    stack: true, format: duration,
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
  const titles = Object.keys(charts);
  return Object.entries(charts).map(([name, series]) => {
    const whole = titles.find((other) => name.startsWith(`${other}_`));
    const kind = whole ? name.slice(whole.length + 1).replaceAll("_", " ") : "";
    const title = `Held-out accuracy, ${whole ? `${whole}: ${kind}` : name}`;
    const how = whole ? `Those problems that are of the kind ${kind}.` : HOW_EVALUATION;
    return { title, how, keys: series, format: percent, share: true, sparse: true };
  });
}

class Curves {
  constructor(runs, { charts, rows }, pick) {
    this.runs = runs;
    this.pick = pick;
    this.curves = charts.map((chart) => (chart.share ? { ...chart, format: percent } : chart));
    this.rows = rows;
    const shown = new Set(this.curves.flatMap(({ keys }) => keys.map(([key]) => key)));
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
    const specOf = (curve) => {
      const key = curve.keys[0][0];
      const format = key.endsWith("_s") || key.endsWith("_time") ? duration : figure;
      return { format, how: HOW[key], ...curve, series: seriesOf(this.runs, curve.keys, curve.sparse ? 1 : window) };
    };
    const specs = [...this.curves.slice(0, 2), ...evaluationCurves(this.runs), ...this.curves.slice(2)].map(specOf);
    const drawn = [];
    const equal = [];
    for (const spec of specs.filter(({ series }) => series.length)) {
      const same = drawn.find((before) => sameLines(before, spec));
      if (same) equal.push(`${spec.title} is equal to ${same.title.toLowerCase()}`);
      else drawn.push(spec);
    }
    const phases = phaseCharts(this.runs).filter(({ series }) => series.length);
    this.charts = [...chosen.map(specOf), ...drawn, ...phases].map((spec) => new Chart(spec, this.pick));
    setChildren(byId("charts"), this.charts.map((chart) => chart.node));
    if (equal.length) byId("charts").append(el("p", { class: "hint equal" }, `${equal.join("; ")}.`));
    const missing = specs.filter(({ series, optional }) => !series.length && !optional).map(({ title }) => title);
    if (missing.length) byId("charts").append(el("p", { class: "hint missing" }, `Not logged by these runs: ${missing.join("; ")}.`));
    this.charts.forEach((chart) => chart.draw());
  }

  table() {
    const shown = new Set(); // a row that is equal to another is left out
    const rows = this.rows.map(({ title, key, share }) => {
      const written = share ? percent : figure;
      const points = this.runs.map((run) => pointsOf(run, key));
      const lines = JSON.stringify(points);
      if (shown.has(lines)) return null;
      shown.add(lines);
      const cells = points.map((series) => {
        const values = series.map((point) => point[1]);
        const fifth = Math.max(1, Math.floor(values.length / 5));
        return values.length ? `${written(mean(values.slice(0, fifth)))} → ${written(mean(values.slice(-fifth)))}` : null;
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
