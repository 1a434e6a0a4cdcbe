// The claims of an answer in its text: coloured by what the figure says of each. Their places come with the record.

// Worst first: where claims overlap, the worst of them gives the colour.
const CLAIMS = {
  false: "false", follows: "false, follows from an earlier error", open: "open: the facts do not say", unread: "not understood",
  new: "true and new", answer: "the answer itself, true", given: "true, stands in the facts", again: "true, said before", nothing: "true, nothing new",
};

/** The parts of a text with its claims marked; a claim in a formula marks the whole formula. */
function claimedParts(text, claims, formulas) {
  const parts = [];
  let end = 0;
  for (const [first, last, verdict] of marksOf(text, claims, formulas)) {
    parts.push(...formulas.partsOf(text.slice(end, first)),
      el("mark", { class: `claim ${verdict}`, title: CLAIMS[verdict] }, formulas.partsOf(text.slice(first, last))));
    end = last;
  }
  return [...parts, ...formulas.partsOf(text.slice(end))];
}

/** Where marks begin and end, in their order, without overlaps. */
function marksOf(text, claims, formulas) {
  const around = [...text.matchAll(formulas.pattern)].map((match) => [match.index, match.index + match[0].length]);
  const grown = claims.filter(([first, last]) => last <= text.length && first < last).map(([first, last, verdict]) => {
    const touched = around.filter(([start, stop]) => start < last && first < stop);
    return [Math.min(first, ...touched.map(([start]) => start)), Math.max(last, ...touched.map(([, stop]) => stop)), verdict];
  });
  grown.sort(([one], [other]) => one - other);
  const order = Object.keys(CLAIMS);
  const marks = [];
  for (const [first, last, verdict] of grown) {
    const before = marks[marks.length - 1];
    if (!before || before[1] <= first) marks.push([first, last, verdict]);
    else {
      before[1] = Math.max(before[1], last);
      if (order.indexOf(verdict) < order.indexOf(before[2])) before[2] = verdict;
    }
  }
  return marks;
}

/** What a look at the verdict alone would miss. */
function luckOf({ verdict, luck }) {
  if (!luck) return null;
  const title = luck === "lucky" ? "The answer is right, but a claim is false, or nothing new is said before it." : "The answer is not right, but a step is true and new, and none is false.";
  return el("span", { class: `badge ${luck}`, title }, luck === "lucky" ? "right by luck" : `${verdict === "wrong" ? "wrong" : "no"} answer, true steps`);
}

/** The number of claims of each kind, as facts of a rollout. */
function stepsOf(rollout) {
  return isNumber(rollout.new) ? [["true, new", rollout.new], ["errors", rollout.false]] : [];
}

/** What the colours of claims mean, for the verdicts that a group has; nothing for one without claims. */
function claimLegend(group) {
  const verdicts = new Set(group.rollouts.flatMap((rollout) => (rollout.steps || []).map(([, , verdict]) => verdict)));
  const shown = Object.keys(CLAIMS).filter((verdict) => verdicts.has(verdict));
  if (!shown.length) return null;
  return el("p", { class: "legend claims" }, "Claims:", shown.map((verdict) => el("mark", { class: `claim ${verdict}` }, CLAIMS[verdict])));
}
