// Formulas in texts: the page's data have each as a tree of MathML elements, by its LaTeX source.

const MATH = "http://www.w3.org/1998/Math/MathML";

class Formulas {
  /** `pattern`: what to look for in a text. `trees`: what is known, by source; it comes later than the rest. */
  constructor(pattern) {
    this.pattern = new RegExp(pattern, "g");
    this.trees = {};
    this.source = false; // whether a person wants to read the LaTeX
  }

  /** The parts of a text as it is shown: strings, and elements for the formulas in it. */
  partsOf(text) {
    const parts = [];
    let end = 0;
    for (const match of this.source ? [] : text.matchAll(this.pattern)) {
      const shown = this.whole(match[0]);
      if (typeof shown === "string") continue;
      parts.push(text.slice(end, match.index), shown);
      end = match.index + match[0].length;
    }
    return [...parts, text.slice(end)];
  }

  /** A text that is a formula altogether, such as an answer; the text itself if it is none. */
  whole(text) {
    if (this.source || !Object.hasOwn(this.trees, text)) return text;
    return el("span", { class: "formula", title: text }, mathOf(this.trees[text]));
  }
}

function mathOf(tree) {
  if (typeof tree === "string") return tree;
  const [tag, attributes, ...children] = tree;
  return fill(document.createElementNS(MATH, tag), attributes, children.map(mathOf));
}
