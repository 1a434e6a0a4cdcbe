// Unpack the data and show them.

const FEW_STEPS = 5; // fewer have nothing to see in their curves

const FIRST_FACTS = ["recipe", "model", "data", "status", "error"];

function factsOf(entries) {
  return el("dl", { class: "facts" }, entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** What each run did, and why: its result, then the sentences from its record, then the facts. One run is named by the
 * heading of the page alone. */
function runCards(runs) {
  return runs.map((run, index) =>
    el("div", { class: "run" },
      runs.length > 1 ? el("h2", {}, el("span", { class: `mark run${index % 6}`, "aria-hidden": "true" }), run.name) : null,
      run.result ? el("p", { class: "result" }, unbroken(capital(run.result))) : null,
      run.story.length ? el("ul", { class: "story" }, run.story.map((sentence) => el("li", {}, unbroken(sentence)))) : null,
      factsOf(Object.entries(run.facts).filter(([name]) => FIRST_FACTS.includes(name))),
      el("details", {}, el("summary", {}, "More about the run"), factsOf(Object.entries(run.facts).filter(([name]) => !FIRST_FACTS.includes(name)))),
      run.notes.map((note) => el("p", { class: "hint" }, note))),
  );
}

async function main() {
  const opened = location.hash.slice(1);
  const data = await unpack("data");
  byId("runs").append(...runCards(data.runs));
  for (const id of ["curves", "groups"]) byId(id).hidden = false;
  const groups = new Groups(data, opened);
  if (data.runs.every((run) => pointsOf(run, "reward").length < FEW_STEPS)) byId("table").open = true;
  new Curves(data.runs, data.figures, (step) => groups.atStep(step));
  addEventListener("beforeprint", () => { byId("table").open = true; groups.print(); });
  addEventListener("afterprint", () => groups.unprint());
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  byId("status").textContent = "Unpacking the texts and diagrams…";
  await new Promise((done) => { setTimeout(done); }); // lets the page appear first
  groups.complete(await unpack("texts"));
  byId("status").remove();
}

function capital(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

main().catch((error) => {
  byId("status").textContent = `This page could not be shown: ${error.message}`;
});
