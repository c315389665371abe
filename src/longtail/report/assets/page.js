"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const [before, after] = data.states;
const classes = data.classes;
const crowded = classes.names.length > 60;
const places = classes.names.map((_, place) => place);
const byId = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const shown = (value) => (value === null ? "none" : value.toFixed(1));
const signed = (value) => (value > 0 ? "+" : "") + value.toFixed(1);
// Plotly reads markup in texts; names are to be shown as they are written.
const escaped = (name) => name.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
// Its beginning and its end, by which many names differ.
const short = (name) => {
  const rest = name.endsWith(" …") ? " …" : ""; // of merged classes; the name of the first keeps its own end
  const letters = [...name.slice(0, name.length - rest.length)];
  const kept = letters.length > 18 ? [...letters.slice(0, 9), "…", ...letters.slice(-8)] : letters;
  return escaped(kept.join("") + rest);
};
const fullNames = classes.names.map(escaped);
const SCORES = Object.fromEntries(data.scores.map((score) => [score.name, score]));
const shownScore = (name, value) => (value === null ? "none" : value.toFixed(SCORES[name].digits));

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function card(name, value, note, mood) {
  const made = element("div", undefined, { class: "card" });
  made.append(element("div", name, { class: "name" }), element("div", value, { class: "value" }));
  if (note !== undefined) made.append(element("div", note, { class: `note ${mood ?? ""}` }));
  return made;
}

// Change of a score in words; of errors lower is better.
function change(name, from, to) {
  if (from === null || to === null) return ["", ""];
  const better = SCORES[name].lower ? to < from : to > from;
  const difference = (to > from ? "+" : "") + (to - from).toFixed(SCORES[name].digits);
  return [`${difference} from ${shownScore(name, from)}`, to === from ? "" : better ? "good" : "bad"];
}

function layout(extra = {}) {
  const axis = { gridcolor: color("line"), zerolinecolor: color("line"), linecolor: color("line") };
  const { xaxis, yaxis, ...rest } = extra;
  return {
    font: { color: color("text"), family: "system-ui, sans-serif", size: 12 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 52, r: 60, t: 34, b: 40 },
    // Standing on the chart it grows upwards, away from the curves, when the chart is narrow.
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, hovermode: "x unified",
    hoverlabel: { bgcolor: color("panel"), bordercolor: color("line"), font: { color: color("text") } },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
  };
}

// The size is said: left to itself Plotly finds it later, too late for paper.
const draw = (id, traces, extra) =>
  Plotly.react(id, traces, layout({ ...extra, width: byId(id).clientWidth, height: byId(id).clientHeight }), { displayModeBar: false });

// Names as far as they fit: every one, or every second, fifth, …
const NAME_ROOM = crowded ? 16 : 11.5;
function nameTicks(names, room) {
  const each = Math.max(Math.ceil((NAME_ROOM * names.length) / Math.max(room, 1)), 1);
  const kept = names.map((_, place) => place).filter((place) => place % each === 0);
  return { tickvals: kept, ticktext: kept.map((place) => short(names[place])) };
}
// Beside the chart stand two axes with their titles.
const classAxis = (id) => ({
  title: { text: "classes, head → tail", standoff: 8 }, showgrid: false, zeroline: false, automargin: true,
  ...nameTicks(classes.names, byId(id).clientWidth - 120),
  ...(classes.names.length > 10 ? { autotickangles: [0, -90], tickfont: { size: 10 } } : { autotickangles: [0, -60] }),
});
const countsBehind = () => ({
  type: "bar", x: places, y: classes.counts, name: "training images", marker: { color: color("counts") }, hoverinfo: "skip",
});
// Where classes are many, each is a faint dot and the line is their running mean.
function curve(values, shade, name) {
  const own = { type: "scatter", x: places, y: values, name, text: fullNames, hovertemplate: "%{text}: %{y}<extra>" + name + "</extra>" };
  if (!crowded) return [{ ...own, mode: "markers", marker: { color: color(shade), size: 8 } }];
  return [
    { ...own, mode: "markers", marker: { color: color(shade), size: 3, opacity: 0.35 }, showlegend: false },
    { type: "scatter", mode: "lines", x: places, y: runningMean(values), name: `${name}, mean of ${2 * REACH + 1} classes`, line: { color: color(shade), width: 2 }, hoverinfo: "skip" },
  ];
}
const REACH = Math.ceil(places.length / 60);
function runningMean(values) {
  return values.map((_, place) => {
    const near = values.slice(Math.max(place - REACH, 0), place + REACH + 1).filter((value) => value !== null);
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}
// A stroke from before to after for each class, so that the eye follows the class and not its neighbours.
const strokes = (from, to) => (crowded ? [] : [{
  type: "scatter", mode: "lines", hoverinfo: "skip", showlegend: false, line: { color: color("quiet"), width: 1 },
  x: places.flatMap((p) => [p, p, null]), y: places.flatMap((p) => [from[p], to[p], null]),
}]);
const shadeOf = (state) => (state === before ? "before" : state === after ? "after" : "other");

function perClass(id, key, title, states) {
  // Counts on the lower axis, curves on the one above it, so that curves stay in front of the bars.
  const quiet = { color: color("quiet") };
  const curves = [...strokes(before[key], after[key]), ...states.flatMap((state) => curve(state[key], shadeOf(state), state.title))];
  draw(id, [countsBehind(), ...curves.map((trace) => ({ ...trace, yaxis: "y2" }))], {
    xaxis: classAxis(id),
    yaxis: { type: "log", dtick: 1, side: "right", showgrid: false, automargin: true, tickfont: quiet, title: { text: "training images", font: quiet, standoff: 8 } },
    yaxis2: { overlaying: "y", side: "left", tickmode: "auto", ...(key === "accuracy" || key === "f1" ? { range: [-2, 102] } : {}), gridcolor: color("line"), zerolinecolor: color("line"), title: { text: title } },
  });
}

const GROUPS = { many: "Many-shot classes", medium: "Medium-shot classes", few: "Few-shot classes" };
function drawCards() {
  const cards = data.figures.map((name) => {
    const [text, mood] = change(name, before.scores[name], after.scores[name]);
    return card(GROUPS[name] ?? SCORES[name].heading, shownScore(name, after.scores[name]), `${text} ${(data.intervals[name] ?? "").replace(" ", "\u00a0")}`.trim(), mood);
  });
  byId("cards").replaceChildren(...cards);
}

function drawMeans() {
  const disalign = data.states.find((state) => state.title === "DisAlign");
  const states = disalign ? [before, disalign, after] : [before, after];
  perClass("logits", "logits", `mean logit, ${data.split} images`, states);
  perClass("margins", "margins", `mean margin, ${data.split} images`, states);
  byId("means-text").textContent =
    `Rank correlation of the mean margin with class size: ${signedTwo(before.correlation.margins)} before, ` +
    `${signedTwo(after.correlation.margins)} after; of the mean logit: ${signedTwo(before.correlation.logits)} before, ` +
    `${signedTwo(after.correlation.logits)} after. A long-tail biased classifier starts near +1.`;
}
const signedTwo = (value) => (value > 0 ? "+" : "") + value.toFixed(2);

function drawChanges() {
  const { value, low, high } = data.changes;
  const mood = places.map((p) => (low[p] > 0 ? "good" : high[p] < 0 ? "bad" : "before"));
  draw("changes", [{
    type: "scatter", mode: "markers", x: places, y: value, text: fullNames, hovertemplate: "%{text}: %{y:+.1f} points<extra></extra>",
    marker: { color: mood.map(color), size: crowded ? 4 : 9 },
    error_y: { type: "data", symmetric: false, array: places.map((p) => high[p] - value[p]), arrayminus: places.map((p) => value[p] - low[p]),
      color: color("quiet"), thickness: crowded ? 0.5 : 1.2, width: 0 },
  }], { xaxis: classAxis("changes"), yaxis: { title: { text: `points of accuracy, ${data.split} images` } }, hovermode: "closest" });
}

function drawConfusion(id, title, values) {
  const names = data.confusion.names.map(escaped);
  // On a narrow screen the names at the left have to do for both sides.
  const fits = byId(id).clientWidth > 400;
  const axis = (text, room) => ({ showgrid: false, zeroline: false, automargin: true, title: { text, standoff: 8 },
    ...(room ? { ...nameTicks(data.confusion.ticks, room), tickfont: { size: 10 } } : { showticklabels: false, ticks: "" }) });
  draw(id, [{
    type: "heatmap", z: values, zmin: 0, zmax: 100, text: names.map((truth) => names.map((other) => `${truth} taken for ${other}`)),
    colorscale: [[0, color("page")], [1, color(id.endsWith("after") ? "after" : "before")]],
    hovertemplate: "%{text}: %{z} %<extra></extra>", colorbar: { title: { text: "%" }, thickness: 10 },
  }], {
    title: { text: title, font: { size: 13 } }, hovermode: "closest", margin: { l: 30, r: 10, t: 40, b: 30 },
    xaxis: { ...axis("predicted class, head → tail", fits ? byId(id).clientWidth - 180 : 0), autotickangles: [0, -90] },
    yaxis: { ...axis("true class, head → tail", byId(id).clientHeight - (fits ? 180 : 140)), autorange: "reversed" },
  });
}

// Bars of few images are pale, because their height says little.
const strengths = (shares) => shares.map((share) => 0.15 + 0.85 * Math.sqrt(share / Math.max(...shares, 1e-9)));

function drawReliability(id, state) {
  draw(id, [
    { type: "bar", x: state.reliability.confidence, y: state.reliability.accuracy, width: 0.055, name: "accuracy",
      marker: { color: color(state === before ? "before" : "after"), opacity: strengths(state.reliability.share) }, customdata: state.reliability.share,
      hovertemplate: "confidence %{x:.2f}: right %{y:.2f} of the time, %{customdata} % of images<extra></extra>" },
    { type: "scatter", mode: "lines", x: [0, 1], y: [0, 1], line: { color: color("quiet"), dash: "dot" }, hoverinfo: "skip", showlegend: false },
  ], { title: { text: `${state.title}: ECE ${shown(state.scores.ece)}`, font: { size: 13 } }, showlegend: false, hovermode: "closest",
    margin: { l: 52, r: 20, t: 40, b: 44 }, xaxis: { range: [0, 1], title: { text: "confidence" } }, yaxis: { range: [0, 1], title: { text: "accuracy" } } });
}

// The point with the lowest cost on validation images or, without costs, the best balanced accuracy.
function bestPoint(points) {
  const loss = (point) => (point.cost === null ? -point.validation.balanced : point.validationCost);
  return points.reduce((best, point) => (loss(point) < loss(best) ? point : best));
}
const costText = (value) => value.toPrecision(3);

function drawPoint() {
  const point = data.points[Number(byId("strength").value)];
  const choosing = point.validation && data.split !== "validation";
  byId("strength-value").textContent = point.strength.toFixed(2);
  byId("apply").hidden = !data.command;
  byId("command").textContent = data.command + (point.strength === 1 ? "" : ` --strength ${point.strength}`);
  const cards = data.figures.map((name) =>
    card(`${GROUPS[name] ?? SCORES[name].heading} (${data.split})`, shown(point.scores[name]), ...change(name, before.scores[name], point.scores[name])));
  if (point.cost !== null) {
    const [cost, from] = [point.cost, data.points[0].cost];
    cards.unshift(card(`Cost per image (${data.split})`, costText(cost), `from ${costText(from)}`, cost < from ? "good" : cost > from ? "bad" : ""));
  }
  if (choosing) {
    const [name, value] = point.cost === null ? [SCORES.balanced.heading, shown(point.validation.balanced)] : ["Cost per image", costText(point.validationCost)];
    cards.unshift(card(`${name} (validation)`, value, "choose by this"));
  }
  byId("point-cards").replaceChildren(...cards);
  const now = [...strokes(before.accuracy, point.accuracy), ...curve(point.accuracy, "after", `strength ${point.strength}`)];
  draw("point-accuracy", [...curve(before.accuracy, "before", "before"), ...now], { xaxis: classAxis("point-accuracy"), yaxis: { range: [-2, 102], title: { text: `accuracy, ${data.split} images (%)` } } });
  const values = data.points.map((p) => p.strength);
  const line = (name, shade) => ({ type: "scatter", mode: "lines", x: values, y: data.points.map((p) => p.scores[name]), name: GROUPS[name] ?? SCORES[name].heading, line: { color: color(shade), width: name === "balanced" ? 3 : 1.6 } });
  const lines = [line("balanced", "after"), line("natural", "before"), line(data.figures[0], "good")];
  const costs = point.cost !== null;
  const costLine = (key, name, dash) => ({ type: "scatter", mode: "lines", x: values, y: data.points.map((p) => p[key]), name, yaxis: "y2", line: { color: color("other"), width: 3, dash } });
  if (costs) lines.push(costLine("cost", "Cost per image", "solid"));
  if (choosing) {
    const best = bestPoint(data.points);
    const star = costs ? { y: [best.validationCost], yaxis: "y2" } : { y: [best.validation.balanced] };
    lines.push({ type: "scatter", mode: "markers", x: [best.strength], ...star, name: "best on validation", marker: { color: color(costs ? "other" : "after"), size: 11, symbol: "star" } });
    lines.push(costs ? costLine("validationCost", "Cost per image (validation)", "dot") : { type: "scatter", mode: "lines", x: values, y: data.points.map((p) => p.validation.balanced), name: `${SCORES.balanced.heading} (validation)`, line: { color: color("after"), dash: "dot" } });
  }
  draw("trade-off", lines, {
    xaxis: { title: { text: "strength (1: whole calibration)" } }, yaxis: { title: { text: `${data.split} images (%)` } }, margin: { l: 52, r: costs ? 56 : 20, t: 34, b: 44 },
    ...(costs ? { yaxis2: { overlaying: "y", side: "right", tickmode: "auto", showgrid: false, rangemode: "tozero", title: { text: "cost per image" } } } : {}),
    shapes: [{ type: "line", x0: point.strength, x1: point.strength, y0: 0, y1: 1, yref: "paper", line: { color: color("quiet"), width: 1 } }],
  });
}

function tableOf(headings, rows) {
  const top = element("thead"), body = element("tbody"), head = element("tr");
  headings.forEach((title) => head.append(element("th", title)));
  rows.forEach((cells) => { const row = element("tr"); cells.forEach((cell) => row.append(element("td", cell))); body.append(row); });
  top.append(head);
  return [top, body];
}

function drawMethods() {
  const diagnosed = data.methods.some((row) => row.natural);
  const headings = ["method", ...data.scores.map((score) => score.heading), "numbers trained", "rank correlation of margins"];
  if (diagnosed) headings.push("diagnose: gain in balanced accuracy", "diagnose: top-1 at training prior");
  const rows = data.methods.map((row) => {
    const known = row.scores ? Object.keys(SCORES).map((name) => shownScore(name, row.scores[name])) : data.scores.map(() => "");
    return [row.title, ...known, row.parameters ?? "", row.correlation === null ? "" : signedTwo(row.correlation), ...(diagnosed ? [row.gain, row.natural] : [])];
  });
  byId("methods").replaceChildren(...tableOf(headings, rows));
  if (!data.checkpoints.length) return;
  const list = element("table");
  list.append(...tableOf(["stage-one data", "before", "after MARC"], data.checkpoints.map((item) => [item.data, shown(item.before), shown(item.after)])));
  byId("checkpoints").replaceChildren(element("h3", "Effect of the stage-one data"), list);
}

function drawPairs(id) {
  const pairs = data[id].map((item) => {
    const made = element("div", undefined, { class: "pair" });
    const text = element("div");
    text.append(element("strong", item.truth), " taken for ", element("strong", item.taken_for));
    // What counts is whether the true class is recognised: a class that is taken for another one now has gained nothing.
    const [had, has] = item.accuracy;
    const mood = has > had ? "good" : has < had ? "bad" : "";
    const note = element("div", `${item.before}\u00a0% before, ${item.after}\u00a0% after`, { class: "note" });
    const accuracy = element("div", `accuracy of ${item.truth}: ${had}\u00a0%\u00a0→\u00a0${has}\u00a0%`, { class: `note ${mood}` });
    made.append(text, note, accuracy, ...item.pictures.map((source) => element("img", undefined, { src: source, alt: `${item.truth} taken for ${item.taken_for}` })));
    return made;
  });
  byId(id).replaceChildren(...pairs);
}

const SHOTS = ["few", "medium", "many"];
// Title, value and, where it is not the value, what to sort by.
const COLUMNS = [
  ["class", (p) => classes.names[p]], ["training images", (p) => classes.counts[p]], ["group", (p) => classes.shots[p], (p) => SHOTS.indexOf(classes.shots[p])],
  ["before", (p) => before.accuracy[p]], ["after", (p) => after.accuracy[p]], ["change", (p) => data.changes.value[p]],
  ["F1 before", (p) => before.f1[p]], ["F1 after", (p) => after.f1[p]],
];
let sorting = { column: 1, down: true };

function drawClasses() {
  const table = byId("classes");
  const words = byId("filter").value.trim().toLowerCase();
  const kept = places.filter((p) => !words || classes.names[p].toLowerCase().includes(words) || classes.shots[p] === words);
  const [, shownValue, value = shownValue] = COLUMNS[sorting.column];
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : (a ?? -Infinity) - (b ?? -Infinity));
  kept.sort((a, b) => (sorting.down ? -1 : 1) * compare(value(a), value(b)));
  const head = element("tr");
  COLUMNS.forEach(([title], number) => {
    const cell = element("th", undefined, number === sorting.column ? { "aria-sort": sorting.down ? "descending" : "ascending" } : {});
    const button = element("button", title);
    button.addEventListener("click", () => {
      sorting = { column: number, down: number === sorting.column ? !sorting.down : number !== 0 };
      drawClasses();
    });
    cell.append(button);
    head.append(cell);
  });
  const body = element("tbody");
  kept.forEach((p) => {
    const row = element("tr");
    COLUMNS.forEach(([title, get]) => {
      const found = get(p);
      const text = title === "change" && found !== null ? signed(found) : typeof found === "number" && title !== "training images" ? shown(found) : found ?? "none";
      const mood = title !== "change" || found === null ? "" : data.changes.low[p] > 0 ? "good" : data.changes.high[p] < 0 ? "bad" : "";
      row.append(element("td", text, { class: mood }));
    });
    body.append(row);
  });
  const top = element("thead"); top.append(head);
  table.replaceChildren(top, body);
  byId("shown").textContent = kept.length === places.length ? `${places.length} classes` : `${kept.length} of ${places.length} classes`;
}

// What a part of the page draws when it is opened: a closed part has no width.
const PARTS = {
  who: drawChanges,
  price: drawPoint,
  confused: () => {
    drawConfusion("confusion-before", "before", data.confusion.before);
    drawConfusion("confusion-after", `after ${after.title}`, data.confusion.after);
  },
  confidence: () => { drawReliability("reliability-before", before); drawReliability("reliability-after", after); },
  why: () => { drawMeans(); perClass("f1", "f1", `F1, ${data.split} images (%)`, [before, after]); },
};
const parts = [...document.querySelectorAll("details")];
const drawPart = (part) => part.open && PARTS[part.id]?.();
function drawCharts() {
  perClass("accuracy", "accuracy", `accuracy, ${data.split} images (%)`, [before, after]);
  parts.forEach(drawPart);
}

document.documentElement.style.setProperty("--longest", Math.min(Math.max(...classes.names.map((name) => name.length)), 18));
if (data.points.length) {
  byId("strength").max = data.points.length - 1;
  byId("strength").value = data.points.findIndex((point) => point.strength === data.strength);
  byId("strength").addEventListener("input", drawPoint);
}
byId("filter").addEventListener("input", drawClasses);
parts.forEach((part) => part.addEventListener("toggle", () => drawPart(part)));
// Paper is white and narrow, whatever the screen is, and shows every part.
let closed = [];
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("paper");
  closed = parts.filter((part) => !part.open);
  closed.forEach((part) => { part.open = true; });
  drawCharts();
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("paper");
  closed.forEach((part) => { part.open = false; });
  drawCharts();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
let width = innerWidth, waiting;
addEventListener("resize", () => {
  if (width === innerWidth) return;
  width = innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(drawCharts, 100);
});
drawCards(); drawMethods(); drawPairs("worst"); drawPairs("new"); drawClasses(); drawCharts();
