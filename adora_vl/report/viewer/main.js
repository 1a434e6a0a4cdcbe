// Unpack the data and show them.

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
  byId("runs").append(...runCards(data.runs));
  for (const id of ["curves", "groups"]) byId(id).hidden = false;
  const groups = new Groups(data, opened);
  new Curves(data.runs, (step) => groups.atStep(step));
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  byId("status").textContent = "Unpacking the texts and diagrams…";
  await new Promise((done) => { setTimeout(done); }); // lets the page appear first
  groups.complete(await unpack("texts"));
  byId("status").remove();
}

main().catch((error) => {
  byId("status").textContent = `This page could not be shown: ${error.message}`;
});
