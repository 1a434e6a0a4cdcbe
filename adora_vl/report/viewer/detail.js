// One group: the diagram, the problem, why it has its weight, its rollouts, and the same problem at other steps.

function detailOf(groups, group) {
  const { formulas } = groups;
  const at = groups.found.indexOf(group);
  return [
    el("div", { class: "bar" },
      headingOf(groups, group),
      el("span", { class: "buttons" },
        el("button", { type: "button", disabled: at <= 0, onclick: () => groups.move(-1) }, "Previous"),
        el("button", { type: "button", disabled: at >= groups.found.length - 1, onclick: () => groups.move(1) }, "Next"),
        el("button", { type: "button", id: "source", "aria-pressed": String(formulas.source), onclick: () => groups.toggleSource() }, "LaTeX source"),
        el("button", { type: "button", id: "follow", onclick: () => groups.follow(group.id) }, "Follow this problem"))),
    problemOf(groups, group),
    claimLegend(group),
    rolloutsOf(groups, group),
    followed(groups, group),
  ];
}

/** A group on paper: without buttons, and without the same problem at other steps. */
function printedOf(groups, group) {
  return [headingOf(groups, group), problemOf(groups, group), claimLegend(group), rolloutsOf(groups, group)];
}

function headingOf(groups, group) {
  const title = groups.data.runs.length > 1 ? `Step ${group.step}, ${group.run.name}` : `Step ${group.step}`;
  return el("h3", {}, title, " ", el("code", {}, group.id));
}

function rolloutsOf(groups, group) {
  const largest = largestAdvantage(group);
  return el("ol", { class: "rollouts" }, group.rollouts.map((rollout, index) => rolloutOf(rollout, index, largest, groups.formulas, groups.images)));
}

/** The pictures with the places of all calls, the problem, and why the group has its weight. */
function problemOf(groups, group) {
  const { facts } = group;
  const { formulas } = groups;
  const names = groups.images ? facts.images.filter((name) => groups.images[name]) : [];
  const calls = callsOf(group);
  const missing = groups.images && facts.images.length > names.length ? el("p", { class: "hint" }, "The diagram is not in this page.") : null;
  return el("div", { class: "problem" },
    names.map((name) => diagramOf(groups.images[name], `Diagram of ${group.id}`, calls.filter(({ picture }) => picture === name))), missing,
    el("div", {},
      el("p", { class: "text" }, formulas.partsOf(facts.problem || "")),
      facts.choices.length ? el("ul", { class: "choices" }, facts.choices.map((choice) => el("li", { class: "text" }, formulas.partsOf(choice)))) : null,
      facts.answer ? el("p", {}, "Right answer: ", el("code", { class: "gold" }, formulas.whole(facts.answer))) : null,
      el("p", { class: "why" }, group.why),
      el("dl", { class: "facts" }, criteriaOf(group))));
}

/** A diagram that a click or Enter shows as large as the window; Escape closes it. The places of calls are drawn on it. */
function diagramOf(source, alt, calls = []) {
  const picture = () => el("span", { class: "picture" }, el("img", { src: source, alt }), calls.length ? placesOf(calls) : null);
  const enlarge = () => {
    setChildren(byId("enlarged-place"), picture());
    byId("enlarged").showModal();
  };
  return el("button", { type: "button", class: "diagram", title: "Enlarge", onclick: enlarge }, picture());
}

/** Where calls look: the region of a zoom as a rectangle, a point as a dot, points as a line through them. */
function placesOf(calls) {
  const percents = ([x, y]) => [100 * x, 100 * y];
  const shapes = calls.flatMap(({ points, region }) => {
    const places = points.map(percents);
    if (region && places.length > 1) {
      const [[left, top], [right, bottom]] = places;
      return [svg("rect", { x: left, y: top, width: Math.max(0, right - left), height: Math.max(0, bottom - top) })];
    }
    const line = places.length > 1 ? [svg("polyline", { points: places.map((place) => place.join(",")).join(" ") })] : [];
    return [...line, ...places.map(([x, y]) => svg("ellipse", { cx: x, cy: y, rx: 1.2, ry: 1.2 }))];
  });
  return svg("svg", { class: "places", viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" }, shapes);
}

function criteriaOf(group) {
  const entries = [
    ["pass rate", percent(group.pass_rate)], ["weight", figure(group.weight)],
    ["longest right", isNumber(group.longest_right) ? `${figure(group.longest_right)} tokens` : "–"],
    ["mean finished wrong", isNumber(group.mean_wrong) ? `${figure(group.mean_wrong)} tokens` : "–"],
  ];
  if (isNumber(group.work_right) || isNumber(group.work_wrong)) {
    entries.push(["most work of a right one", figure(group.work_right)], ["mean work of finished wrong ones", figure(group.work_wrong)]);
  }
  return entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
}

function largestAdvantage(group) {
  return Math.max(1e-9, ...group.rollouts.flatMap((rollout) => [rollout.advantage_raw, rollout.advantage].filter(isNumber).map(Math.abs)));
}

/** The advantage before the weight as an outline, after it filled; to the right of the middle is positive. */
function bars(rollout, largest) {
  const one = (value, css) => {
    const size = (Math.abs(value) / largest) * 49;
    return svg("rect", { class: css, x: value < 0 ? 50 - size : 50, y: 2, width: size, height: 10 });
  };
  const both = [["before", rollout.advantage_raw], ["after", rollout.advantage]].filter(([, value]) => isNumber(value));
  return svg("svg", { class: "bars", viewBox: "0 0 100 14", "aria-hidden": "true", preserveAspectRatio: "none" },
    both.map(([css, value]) => one(value, css)), svg("line", { class: "middle", x1: 50, x2: 50, y1: 0, y2: 14 }));
}

/** A reward may be missing: its function did not score this answer. */
function scored(value) {
  return isNumber(value) ? figure(value) : "not scored";
}

function rolloutOf(rollout, index, largest, formulas, images) {
  const [sign, word] = verdictOf(rollout);
  const facts = [
    ...(rollout.verdict ? [["answer", rollout.extracted === null ? "no box" : el("code", {}, formulas.whole(rollout.extracted))]] : []),
    ["reward", scored(rollout.reward)],
    ...(rollout.missing ? [["no reward", rollout.missing]] : []),
    ...Object.entries(rollout.parts || {}).map(([name, value]) => [name, scored(value)]),
    ["advantage", [figure(rollout.advantage_raw), " → ", el("strong", {}, figure(rollout.advantage)), bars(rollout, largest)]],
    ["length", `${figure(rollout.length)} tokens${rollout.truncated ? ", cut off" : ""}`],
    ...stepsOf(rollout),
    ...(isNumber(rollout.drift) ? [["drift", `${figure(rollout.drift)} nats`]] : []),
    ...(isNumber(rollout.segments) ? [["parts", rollout.segments], ["age", `${rollout.age} generation${rollout.age === 1 ? "" : "s"}`]] : []),
    ...(rollout.reason ? [["graded by", rollout.reason.replaceAll("_", " ")]] : []),
    ...(rollout.compared ? [["part by part", comparedOf(rollout.compared, formulas)]] : []),
  ];
  return el("li", { class: `rollout ${rollout.verdict || ""}` },
    el("div", { class: "head" }, el("span", { class: "number" }, `#${index + 1}`), el("span", { class: `verdict ${rollout.verdict || ""}` }, el("span", { "aria-hidden": "true" }, `${sign} `), word), luckOf(rollout)),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", { class: ["advantage", "no reward", "part by part"].includes(name) ? "wide" : null }, el("dt", {}, name), el("dd", {}, value)))),
    rollout.turns ? conversationOf(rollout.turns, formulas, images || {}) : rollout.completion === undefined ? el("p", { class: "hint" }, "Unpacking…") : textOf(rollout.completion || "", formulas, rollout.steps));
}

/** What the model said, and what tools showed it; that is not learned from, and grey. */
function conversationOf(turns, formulas, images) {
  return el("ol", { class: "turns" }, turns.map(({ by, text, calls, images: names, seconds, failed }) =>
    el("li", { class: failed ? `${by} failed` : by },
      el("span", { class: "hint" }, by === "tool" ? `tool, ${duration(seconds)}` : by), text ? textOf(text, formulas) : null,
      calls.map((call) => callOf(call, images)),
      names.map((name) => images[name] ? diagramOf(images[name], "Picture of a tool") : null))));
}

/** A call as one line, and where it looks. */
function callOf(call, images) {
  const source = call.picture ? images[call.picture] : null;
  return el("div", { class: "call" }, el("code", {}, call.text), source ? diagramOf(source, `Where ${call.text} looks`, [call]) : null);
}

/** Each part of an answer, the part of the right answer that it was compared with, and the rule that decided. */
function comparedOf(compared, formulas) {
  const code = (text) => el("code", {}, formulas.whole(text));
  return el("ol", { class: "compared" }, compared.map(([answer, reference, reason]) =>
    el("li", {}, code(answer), " against ", code(reference), `: ${reason.replaceAll("_", " ")}`)));
}

function textOf(text, formulas, claims = null) {
  const partsOf = (part) => claims ? claimedParts(part, claims, formulas) : formulas.partsOf(part);
  if (text.length <= LONG) return el("p", { class: "text" }, partsOf(text));
  const start = () => [...partsOf(text.slice(0, LONG)), "…"];
  const shown = el("p", { class: "text" }, start());
  const toggle = () => {
    const open = more.getAttribute("aria-expanded") === "true";
    setChildren(shown, open ? start() : partsOf(text));
    more.setAttribute("aria-expanded", String(!open));
    more.textContent = open ? `Show all ${text.length.toLocaleString("en")} characters` : "Show less";
  };
  const more = el("button", { type: "button", "aria-expanded": "false", onclick: toggle }, `Show all ${text.length.toLocaleString("en")} characters`);
  return el("div", {}, shown, more);
}

/** The same problem wherever it was recorded, in all runs. */
function followed(groups, group) {
  const same = groups.all.filter((other) => other.id === group.id);
  if (same.length < 2) return el("p", { class: "hint" }, "This problem was recorded once.");
  const rows = same.map((other) => {
    const link = other === group ? `step ${other.step}` : el("button", { type: "button", class: "link", onclick: () => groups.jump(other) }, `step ${other.step}`);
    return el("tr", { "aria-current": other === group ? "true" : null }, el("th", { scope: "row" }, link), el("td", {}, other.run.name),
      el("td", {}, dots(other)), el("td", {}, percent(other.pass_rate)), el("td", {}, figure(other.weight)),
      el("td", {}, figure(mean(other.rollouts.map(({ length }) => length)))));
  });
  const head = ["step", "run", "rollouts", "pass rate", "weight", "mean length"].map((name) => el("th", { scope: "col" }, name));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "This problem through the steps" },
    el("table", { id: "followed" }, el("caption", {}, "This problem through the steps"), el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}
