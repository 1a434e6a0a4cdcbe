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

async function main() {
  const opened = location.hash.slice(1);
  const data = await unpack("data");
  byId("result").append(...data.runs.filter((run) => run.result).map((run) => el("p", { class: "result" }, `${run.name}: ${run.result}`)));
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
