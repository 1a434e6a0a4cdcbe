"use strict";
// The only ways by which this page makes elements: texts become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...presentOf(children));
  return node;
}

/** The children that are there: null stands for an element that is left out. The browser would write it as a word. */
function presentOf(children) {
  return children.flat().filter((child) => child !== null && child !== undefined && child !== "");
}

/** Put these children in the place of those that a node has. */
function setChildren(node, ...children) {
  node.replaceChildren(...presentOf(children));
}

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function byId(id) {
  return document.getElementById(id);
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** A figure as a person writes it: three digits, no more zeros than needed. */
function figure(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e5) ? size.toExponential(1) : size >= 100 ? size.toFixed(0) : String(Number(size.toPrecision(3)));
  return value < 0 ? `−${text}` : text;
}

/** A time as a person writes it: `0.44 ms`, `1.7 s`. */
function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  return seconds !== 0 && Math.abs(seconds) < 0.1 ? `${figure(1000 * seconds)} ms` : `${figure(seconds)} s`;
}

function percent(value) {
  return isNumber(value) ? `${Math.round(100 * value)} %` : "–";
}

/** A text whose lines do not end between a figure and the sign behind it. */
function unbroken(text) {
  return text.replaceAll(/(\d) (?=[%→])/g, "$1\u00a0");
}

function mean(values) {
  const known = values.filter(isNumber);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** What a compressed block of the page holds; the block is dropped. */
async function unpack(id) {
  const block = byId(id);
  const letters = atob(block.textContent.trim());
  block.remove();
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i); // many times faster than a callback a byte
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}
