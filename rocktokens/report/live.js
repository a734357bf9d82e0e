"use strict";
// The live page: asks this server for new numbers, draws them, and shows texts as text only.
(() => {
  const $ = (id) => document.getElementById(id);
  const names = { loss: "all", loss_rocks: "rocks", loss_rest: "the rest" };
  const colours = ["rest", "rock", "third", "rare", "fifth", "sixth", "muted"];
  const levels = [0.01, 0.03, 0.1, 0.3, 1, 3];
  const space = document.querySelector("svg").namespaceURI;
  const svg = (tag, values, text) => {
    const made = document.createElementNS(space, tag);
    for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const element = (tag, text, kind) => Object.assign(document.createElement(tag), { textContent: text ?? "", className: kind ?? "" });
  const short = (value) => Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));

  function plot(box, series, { low, high, form = short } = {}) {
    const height = box.viewBox.baseVal.height, left = 66, right = 706, bottom = height - 26;
    // Names stand in as many rows as they need, above the curves; about 6.5 units a letter.
    const said = (line) => `${line.name}: ${form(line.points.at(-1)[1])}`;
    let at = left, row = 0;
    const places = series.map((line) => {
      const wide = 6.5 * said(line).length + 18;
      if (at > left && at + wide > right) { at = left; row += 1; }
      at += wide;
      return [at - wide, 14 + 15 * row];
    });
    const top = 26 + 15 * row;
    box.replaceChildren();
    const all = series.flatMap((line) => line.points), steps = all.map(([step]) => step), values = all.map(([, value]) => value);
    if (!all.length) { box.append(svg("text", { x: 360, y: height / 2, class: "none" }, "not measured yet")); return; }
    const first = Math.min(...steps), last = Math.max(...steps, first + 1);
    const least = low ?? Math.min(...values), most = Math.max(high ?? Math.max(...values), least + 1e-9);
    const x = (step) => left + (right - left) * (step - first) / (last - first);
    const y = (value) => bottom - (bottom - top) * (Math.min(Math.max(value, least), most) - least) / (most - least);
    for (const share of [0, 0.5, 1]) {
      const value = least + share * (most - least);
      box.append(svg("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "grid" }), svg("text", { x: left - 6, y: y(value) + 4, class: "tick end" }, form(value)));
    }
    box.append(svg("text", { x: left, y: height - 6, class: "tick" }, `step ${first}`), svg("text", { x: right, y: height - 6, class: "tick end" }, `step ${last}`));
    series.forEach((line, index) => {
      const colour = line.colour ?? colours[index % colours.length];
      const path = line.points.map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      box.append(svg("path", { d: path, class: `line ${colour}`, "data-series": line.name, "data-points": line.points.length }));
      if (line.marks) line.points.forEach(([step, value]) => box.append(svg("circle", { cx: x(step), cy: y(value), r: 3, class: `dot ${colour}` })));
      box.append(svg("text", { x: places[index][0], y: places[index][1], class: `name ${colour}` }, said(line)));
    });
  }

  const pairs = (curve, name) => (curve[name] ?? []).map((value, index) => [curve.step[index], value]).filter(([, value]) => value !== null);
  function draw(data) {
    const runs = Object.entries(data.curves), many = runs.length > 1;
    const title = (run, name) => many ? `${run}${name ? " " + name : ""}` : name || run;
    const main = data.curves.distillation;
    const own = main ? ["loss_rocks", "loss_rest"].map((name) => ({ name: names[name], points: pairs(main, name), colour: { loss_rocks: "rock", loss_rest: "rest" }[name] })) : [];
    const lines = [...own, ...runs.map(([run, curve], index) => ({ name: many ? run : names.loss, points: pairs(curve, "loss"), colour: many ? colours[(index + 2) % colours.length] : "muted" }))];
    plot($("loss"), lines.filter((line) => line.points.length), { low: 0 });
    const percent = (value) => `${(100 * value).toFixed(1)} %`;
    plot($("accuracy"), runs.map(([run, curve]) => ({ name: title(run, "accuracy"), marks: true, points: curve.evaluations.map(([step, value]) => [step, value]) })).filter((line) => line.points.length), { low: 0, high: 1, form: percent });
    plot($("kept"), runs.map(([run, curve]) => ({ name: title(run, "kept"), points: pairs(curve, "kept_share") })).filter((line) => line.points.length), { low: 0, high: 1, form: percent });
    const step = main?.step.at(-1);
    const where = data.complete.includes("distill") ? `stages complete: ${data.complete.join(", ")}` : step !== undefined ? `step ${step} of ${data.steps ?? "?"}` : "no step recorded yet";
    $("now").textContent = `${where} · ${data.title} · refreshed ${new Date().toLocaleTimeString()}`;
    $("split").textContent = `Underlined tokens: ${data.rocks}.`;
    $("newest").replaceChildren(...data.rollouts.map((rollout) => {
      const block = element("div", "", "fresh"), text = element("p", "", "tokens");
      for (const [word, cost, rock] of rollout.tokens) {
        const token = element("span", word, `t ${cost === null ? "lx" : "l" + levels.filter((edge) => cost >= edge).length}${rock ? " rock" : ""}`);
        token.title = cost === null ? "not measured" : `${cost} nats`;
        text.append(token);
      }
      block.append(text, element("p", rollout.id, "note"));
      return block;
    }));
    document.documentElement.dataset.step = step ?? "";
    document.documentElement.dataset.refreshed = String(Number(document.documentElement.dataset.refreshed ?? 0) + 1);
  }

  let failed = 0;
  async function refresh() {
    try {
      const answer = await fetch("live.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      draw(await answer.json());
      failed = 0;
    } catch (error) {
      failed += 1;
      if (failed > 2) $("now").textContent = "The server does not answer; start `rocktokens view` again.";
    }
    setTimeout(refresh, document.hidden ? 10000 : 2000);
  }
  refresh();
})();
