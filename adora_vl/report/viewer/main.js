// Unpack the data and show them.

const FEW_STEPS = 5;

function runCards(runs) {
  return runs.map((run, index) =>
    el("div", { class: "run" },
      el("h2", {}, el("span", { class: `mark run${index % 6}`, "aria-hidden": "true" }), run.name),
      el("dl", { class: "facts" }, Object.entries(run.facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      run.notes.map((note) => el("p", { class: "hint" }, note))),
  );
}

/** What came of a run, in one line: held-out accuracy where it was measured, else the pass rate of the training. */
function resultOf(run) {
  const held = Object.keys(run.metrics.reduce((keys, line) => Object.assign(keys, line), {})).filter((key) => /^eval_.*_accuracy$/.test(key)).sort(
    (one, other) => /_image_accuracy$/.test(other) - /_image_accuracy$/.test(one) || (one < other ? -1 : 1))[0]; // of four views the pictures
  const key = held || (pointsOf(run, "adora/pass_rate").length ? "adora/pass_rate" : "reward");
  const values = pointsOf(run, key).map((point) => point[1]);
  if (!values.length) return null;
  const size = held ? 1 : Math.max(1, Math.floor(values.length / 5));
  const [first, last] = [mean(values.slice(0, size)), mean(values.slice(-size))];
  const show = key === "reward" ? figure : percent;
  const title = held ? `held-out accuracy, ${held.slice(5, -9)}` : key === "reward" ? "reward" : "pass rate in training";
  const spans = held ? "first and last evaluation" : "first and last fifth of the steps";
  return `${run.name}: ${title} ${show(first)} → ${show(last)} (${spans})`;
}

async function main() {
  const opened = location.hash.slice(1);
  const data = await unpack("data");
  byId("result").append(...data.runs.map(resultOf).filter(Boolean).map((line) => el("p", { class: "result" }, line)));
  byId("runs").append(...runCards(data.runs));
  for (const id of ["curves", "groups"]) byId(id).hidden = false;
  const groups = new Groups(data, opened);
  if (data.runs.every((run) => pointsOf(run, "reward").length < FEW_STEPS)) { // nothing to see in their curves
    byId("groups").after(byId("curves"));
    byId("table").open = true;
  }
  new Curves(data.runs, (step) => groups.atStep(step));
  addEventListener("beforeprint", () => { byId("table").open = true; });
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  byId("status").textContent = "Unpacking the texts and diagrams…";
  await new Promise((done) => { setTimeout(done); }); // lets the page appear first
  groups.complete(await unpack("texts"));
  byId("status").remove();
}

main().catch((error) => {
  byId("status").textContent = `This page could not be shown: ${error.message}`;
});
