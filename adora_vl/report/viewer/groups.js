// The browser of groups: filters, a list in pages, and one group with its rollouts.

const PAGE = 50;
const LONG = 900; // characters of a completion that are shown at once
const VERDICTS = { correct: ["✓", "right"], wrong: ["✗", "wrong"], unparseable: ["?", "unparseable"] };
const VERDICT_FILTERS = [
  ["", "any"], ["correct", "some right"], ["wrong", "some wrong"], ["unparseable", "some unparseable"],
  ["mixed", "right and not right"], ["all", "all right"], ["none", "none right"],
];
const WEIGHT_FILTERS = [
  ["", "any"], ["tds", "TDS"], ["tas", "not TDS"], ["changed", "weight is not 1"], ["one", "weight is 1"],
  ["signal", "rewards differ"], ["held", "differ, weight is not 1"],
];

const CALL_FILTERS = [["", "any"], ["called", "called a tool"], ["failed", "a call failed"], ["none", "no call"]];
/** Each order: its name, and the figure of a group by which the largest comes first. */
const ORDERS = {
  step: ["step", null],
  weight: ["weight, lowest first", (group) => -(group.weight ?? 1)],
  advantage: ["|advantage|, largest first", (group) => meanOf(group, ({ advantage }) => isNumber(advantage) ? Math.abs(advantage) : null)],
  disagreement: ["disagreement of rewards", (group) => spread(group.rollouts.map(({ reward }) => reward))],
  length: ["length, longest first", (group) => meanOf(group, ({ length }) => length)],
};
const WORDS = 6; // of a problem in the list
const PRINTED = 20; // groups on paper at most

function meanOf(group, value) {
  return mean(group.rollouts.map(value)) ?? -Infinity;
}

/** The standard deviation; lowest where fewer than two values are known. */
function spread(values) {
  const known = values.filter(isNumber);
  if (known.length < 2) return -Infinity;
  const middle = mean(known);
  return Math.sqrt(mean(known.map((value) => (value - middle) ** 2)));
}

function sorted(groups, order) {
  const size = ORDERS[order][1];
  if (!size) return groups;
  const sizes = new Map(groups.map((group) => [group, size(group)]));
  return [...groups].sort((a, b) => sizes.get(b) - sizes.get(a) || a.step - b.step);
}

function callsOf(group) {
  return group.rollouts.flatMap(({ turns }) => (turns || []).flatMap(({ calls }) => calls));
}

function firstWords(text) {
  const words = (text || "").split(/\s+/).filter(Boolean);
  return words.slice(0, WORDS).join(" ") + (words.length > WORDS ? "…" : "");
}

function verdictOf(rollout) {
  return VERDICTS[rollout.verdict] || ["·", rollout.verdict || "not graded"];
}

/** Every group of every run in one list, in the order of steps, with rollouts as objects; `run.rollouts` has all of a run. */
function allGroups(data) {
  const groups = data.runs.flatMap((run, index) => {
    run.rollouts = [];
    return run.groups.map((group) => {
      const rollouts = group.rollouts.map((values) => Object.fromEntries(data.rollout.map((name, i) => [name, values[i]])));
      run.rollouts.push(...rollouts);
      return { ...group, run, index, rollouts, right: rollouts.filter(({ verdict }) => verdict === "correct").length, facts: run.problems[group.id] };
    });
  });
  return groups.sort((a, b) => a.step - b.step || a.index - b.index);
}

function fits(group, wanted) {
  const { run, from, to, verdict, weight, calls, id, text } = wanted;
  if (run !== "" && group.index !== Number(run)) return false;
  if ((from !== "" && group.step < Number(from)) || (to !== "" && group.step > Number(to))) return false;
  if (id && !(id === wanted.exact ? group.id === id : group.id.toLowerCase().includes(id.toLowerCase()))) return false;
  if (weight === "tds" && !group.tds) return false;
  if (weight === "tas" && group.tds) return false;
  if (weight === "changed" && group.weight === 1) return false;
  if (weight === "one" && group.weight !== 1) return false;
  if ((weight === "signal" || weight === "held") && group.equal) return false;
  if (weight === "held" && group.weight === 1) return false;
  if (calls === "called" && !callsOf(group).length) return false;
  if (calls === "none" && callsOf(group).length) return false;
  if (calls === "failed" && !group.rollouts.some(({ turns }) => (turns || []).some(({ failed }) => failed))) return false;
  if (verdict === "mixed" && !(group.right && group.right < group.rollouts.length)) return false;
  if (verdict === "all" && group.right !== group.rollouts.length) return false;
  if (verdict === "none" && group.right) return false;
  if (VERDICTS[verdict] && !group.rollouts.some((rollout) => rollout.verdict === verdict)) return false;
  if (!text) return true;
  const low = text.toLowerCase();
  return [group.facts.problem, ...group.facts.choices, ...group.rollouts.map(({ completion }) => completion)].some((one) => (one || "").toLowerCase().includes(low));
}

function dots(group) {
  return el("span", { class: "dots", "aria-hidden": "true" }, group.rollouts.map((rollout) => el("span", { class: `dot ${rollout.verdict || ""}` }, verdictOf(rollout)[0])));
}

function badge(group) {
  if (group.weight === null) return null;
  const label = group.tds ? "TDS " : "";
  return group.weight === 1 && !group.tds ? null : el("span", { class: "badge" }, `${label}×${figure(group.weight)}`);
}

/** Lets a copied address lead back to this group; some browsers refuse it for a file. */
function address(hash) {
  try {
    history.replaceState(null, "", hash);
  } catch {
    // the page works without
  }
}

class Groups {
  constructor(data, opened) {
    this.data = data;
    this.all = allGroups(data);
    this.images = null;
    this.formulas = new Formulas(data.formula);
    this.exact = null;
    this.selected = null;
    const options = (id, entries) => byId(id).append(...entries.map(([value, label]) => el("option", { value }, label)));
    options("filter-run", [["", "all"], ...data.runs.map((run, index) => [String(index), run.name])]);
    options("filter-verdict", VERDICT_FILTERS);
    options("filter-weight", WEIGHT_FILTERS);
    options("filter-calls", CALL_FILTERS);
    options("filter-sort", Object.entries(ORDERS).map(([value, [label]]) => [value, label]));
    byId("run-label").hidden = data.runs.length < 2;
    byId("calls-label").hidden = !this.all.some((group) => group.rollouts.some(({ turns }) => turns));
    byId("filters").addEventListener("input", () => this.filter());
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("filters").addEventListener("reset", () => { this.exact = null; setTimeout(() => this.filter()); });
    byId("page-back").addEventListener("click", () => this.turn(-1));
    byId("page-on").addEventListener("click", () => this.turn(1));
    document.addEventListener("keydown", (event) => this.key(event));
    this.filter();
    this.restore(opened);
  }

  filter() {
    const wanted = { exact: this.exact };
    for (const name of ["run", "from", "to", "verdict", "weight", "calls", "id", "text"]) wanted[name] = byId(`filter-${name}`).value;
    this.found = sorted(this.all.filter((group) => fits(group, wanted)), byId("filter-sort").value);
    byId("count").textContent = `${this.found.length.toLocaleString("en")} of ${this.all.length.toLocaleString("en")} groups.`;
    this.page = 0;
    this.show(this.found.includes(this.selected) ? this.selected : this.found[0] || null);
  }

  turn(by) {
    this.page += by;
    this.show(this.found[this.page * PAGE]);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, .plot")) return;
    if (event.key === "j") this.move(1);
    else if (event.key === "k") this.move(-1);
    else if (event.key === "f" && this.selected) this.follow(this.selected.id);
  }

  move(by) {
    const at = this.found.indexOf(this.selected) + by;
    if (this.found[at]) this.show(this.found[at], true);
  }

  /** All groups of one problem, whatever else was filtered. */
  follow(id) {
    byId("filters").reset();
    byId("filter-id").value = id;
    this.exact = id;
    this.filter();
  }

  /** The completions and diagrams, which come after the rest. */
  complete({ completions, images, math }) {
    this.images = images;
    this.formulas.trees = math;
    this.data.runs.forEach((run, index) => run.rollouts.forEach((rollout, i) => { rollout.completion = completions[index][i]; }));
    if (byId("filter-text").value) this.filter();
    else this.show(this.selected);
  }

  /** The formulas as they are written, or as they are printed. */
  toggleSource() {
    this.formulas.source = !this.formulas.source;
    this.show(this.selected);
    byId("source").focus();
  }

  /** A group that the filters may hide. */
  jump(group) {
    if (!this.found.includes(group)) this.follow(group.id);
    this.show(group);
  }

  /** The rollouts of one step of all runs: what a click on a curve asks for. */
  atStep(step) {
    byId("filter-from").value = byId("filter-to").value = step;
    this.filter();
    if (!this.found.length) {
      const before = this.all.filter((group) => group.step <= step).pop();
      if (before) byId("filter-from").value = byId("filter-to").value = before.step;
      this.filter();
    }
    byId("groups").scrollIntoView();
  }

  show(group, focus = false) {
    this.selected = group;
    const at = group ? this.found.indexOf(group) : -1;
    if (at >= 0) this.page = Math.floor(at / PAGE);
    this.list(focus);
    const reason = this.all.length ? "No group fits these filters." : "No rollouts were recorded.";
    setChildren(byId("detail"), group ? detailOf(this, group) : el("p", {}, reason));
    if (group) address(`#run=${group.index}&step=${group.step}&id=${encodeURIComponent(group.id)}`);
  }

  list(focus) {
    const start = this.page * PAGE;
    const pages = Math.max(1, Math.ceil(this.found.length / PAGE));
    const buttons = this.found.slice(start, start + PAGE).map((group) => {
      const current = group === this.selected;
      const name = `Step ${group.step}, ${group.run.name}, ${group.id}, ${group.right} of ${group.rollouts.length} right${group.tds ? ", TDS" : ""}`;
      const choose = () => { this.show(group, true); if (matchMedia("(max-width: 800px)").matches) byId("detail").scrollIntoView(); };
      const run = this.data.runs.length > 1 ? el("span", { class: `mark run${group.index % 6}`, "aria-hidden": "true" }) : null;
      const source = this.images && group.facts.images.map((image) => this.images[image]).find(Boolean);
      const thumbnail = source ? el("img", { class: "thumbnail", src: source, alt: "", loading: "lazy" }) : null;
      return el("li", {}, el("button", { type: "button", title: group.id, "aria-current": current ? "true" : null, "aria-label": name, onclick: choose },
        thumbnail, el("span", { class: "entry" },
          el("span", { class: "line1" }, run, `step ${group.step}`, badge(group)),
          el("span", { class: "line2" }, firstWords(group.facts.problem) || group.id), dots(group))));
    });
    setChildren(byId("list"), buttons);
    const chosen = byId("list").querySelector("[aria-current]");
    if (chosen) {
      const box = byId("list"), top = chosen.offsetTop - box.offsetTop;
      if (top < box.scrollTop || top + chosen.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 3;
      if (focus) chosen.focus({ preventScroll: true });
    }
    byId("page-number").textContent = `${this.page + 1} of ${pages}`;
    byId("page-back").disabled = this.page === 0;
    byId("page-on").disabled = this.page >= pages - 1;
  }

  /** For paper: all groups of the filter, up to a limit, in place of the selected one. */
  print() {
    const groups = this.found.slice(0, PRINTED);
    const count = this.found.length > groups.length ? el("p", { class: "hint" }, `The first ${groups.length} of ${this.found.length.toLocaleString("en")} groups of the filter.`) : null;
    setChildren(byId("printed"), count, groups.map((group) => el("article", {}, printedOf(this, group))));
  }

  unprint() {
    setChildren(byId("printed"));
  }

  /** The group that the address names, where a link was kept. */
  restore(opened) {
    const named = new URLSearchParams(opened);
    const group = this.all.find((one) => one.id === named.get("id") && String(one.step) === named.get("step") && String(one.index) === named.get("run"));
    if (group) this.show(group);
  }
}
