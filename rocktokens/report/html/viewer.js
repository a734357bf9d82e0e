"use strict";
// The rollout viewer. Every text is set as text, never as HTML: tokens and prompts come from strangers.
(() => {
  const data = window.rocktokens.report.viewer;
  if (!data) return;
  const $ = (id) => document.getElementById(id);
  const box = $("tokens"), panel = $("panel");
  const levels = [0.01, 0.03, 0.1, 0.3, 1, 3];
  const state = { found: [], at: 0, column: "kl", hits: new Set() };

  const level = (value) => value === null || value === undefined ? "lx" : "l" + levels.filter((edge) => value >= edge).length;
  const show = (value) => value === null || value === undefined ? "not measured" : String(value).replace("-", "−");
  const element = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };

  // Text of every rollout with the place of each token in it, for searching.
  for (const rollout of data.rollouts) {
    let text = "";
    rollout.starts = rollout.tokens.map((type) => { const start = text.length; text += data.types[type].flow.toLowerCase(); return start; });
    rollout.text = text;
  }

  function hitsOf(rollout) {
    const words = $("search").value.toLowerCase(), cluster = $("cluster").value, type = $("type").value;
    const hits = new Set();
    let found = true;
    if (words) {
      found = false;
      for (let at = rollout.text.indexOf(words); at >= 0; at = rollout.text.indexOf(words, at + words.length)) {
        found = true;
        rollout.starts.forEach((start, index) => {
          const end = index + 1 < rollout.starts.length ? rollout.starts[index + 1] : rollout.text.length;
          if (start < at + words.length && end > at) hits.add(index);
        });
      }
      if (!found && (rollout.prompt ?? "").toLowerCase().includes(words)) found = true;
    }
    const matches = [];
    if (cluster) matches.push((index) => data.types[rollout.tokens[index]].cluster === cluster);
    if (type) matches.push((index) => String(rollout.tokens[index]) === type);
    for (const match of matches) {
      const own = rollout.tokens.map((_, index) => index).filter(match);
      if (!own.length) found = false;
      own.forEach((index) => hits.add(index));
    }
    return found ? hits : null;
  }

  function filter() {
    const answer = $("answered").value;
    state.found = data.rollouts.map((rollout) => ({ rollout, hits: hitsOf(rollout) })).filter(({ rollout, hits }) =>
      hits && (answer === "" || String(rollout.correct) === answer));
    state.at = 0;
    render();
  }

  function render() {
    box.replaceChildren();
    const total = state.found.length;
    $("previous").disabled = state.at <= 0;
    $("next").disabled = state.at >= total - 1;
    if (!total) {
      $("count").textContent = "No rollout matches";
      $("prompt").textContent = "";
      $("outcome").textContent = "";
      box.append(element("p", "No rollout matches these filters.", "empty"));
      return;
    }
    const { rollout, hits } = state.found[state.at];
    const marked = hits.size ? `, ${hits.size} marked` : "";
    $("count").textContent = `Rollout ${state.at + 1} of ${total}${marked}`;
    $("prompt").textContent = rollout.prompt ?? `Prompt of ${rollout.id}: its text was not recorded`;
    const judged = rollout.correct === null ? "Not checked" : rollout.correct ? "Right" : "Wrong";
    const cut = rollout.truncated ? ", cut at the length limit" : "";
    const part = rollout.length > rollout.tokens.length ? `, first ${rollout.tokens.length} shown` : "";
    $("outcome").textContent = `${judged}${rollout.answer !== null ? " (reference " + rollout.answer + ")" : ""} · ${rollout.id} · ${rollout.length} positions${cut}${part}`;
    const values = rollout.columns[state.column] ?? [];
    rollout.tokens.forEach((type, index) => {
      const token = element("span", data.types[type].flow, `t ${level(values[index])}`);
      if (data.types[type].rock) token.classList.add("rock");
      if (hits.has(index)) token.classList.add("hit");
      token.tabIndex = index === 0 ? 0 : -1;
      token.dataset.index = index;
      token.setAttribute("role", "button");
      token.setAttribute("aria-label", `${data.types[type].text}${data.types[type].rock ? ", rock" : ""}, ${show(values[index])} nats`);
      box.append(token);
    });
    read(box.querySelector(".hit") ?? box.querySelector(".rock") ?? box.firstElementChild);
  }

  function read(token) {
    if (!token?.dataset?.index) return;
    const { rollout } = state.found[state.at], index = Number(token.dataset.index), type = data.types[rollout.tokens[index]];
    const list = element("dl");
    const row = (name, value, key) => {
      const pair = element("div"), dd = element("dd", value);
      dd.dataset.key = key;
      pair.append(element("dt", name), dd);
      list.append(pair);
    };
    row("position", rollout.positions ? rollout.positions[index] : index, "position");
    row("token id", type.id, "token_id");
    row("kind", type.cluster, "cluster");
    row("rock", type.rock ? `yes, by ${data.definition}` : "no", "rock");
    for (const [key, title] of Object.entries(data.titles)) {
      if (rollout.columns[key]) row(title, show(rollout.columns[key][index]), key);
    }
    if (type.verdict) row("banned at inference", type.verdict, "verdict");
    const spelled = Object.entries(rollout.spells).map(([start, text]) => [Number(start), text]).filter(([start]) => start <= index).pop();
    const isPart = spelled && rollout.tokens.slice(spelled[0], index + 1).every((other) => data.types[other].text.includes("\ufffd"));
    if (isPart) row("part of", spelled[1], "spells");
    panel.replaceChildren(element("div", type.text, "what"), list);
  }

  function move(from, to) {
    const all = [...box.children];
    const target = all[Math.max(0, Math.min(all.length - 1, to))];
    if (!target?.dataset.index) return;
    if (from) from.tabIndex = -1;
    target.tabIndex = 0;
    target.focus();
  }
  function page(by) {
    const at = state.at + by;
    if (at < 0 || at >= state.found.length) return;
    state.at = at;
    render();
  }

  box.addEventListener("mouseover", (event) => read(event.target.closest(".t")));
  box.addEventListener("focusin", (event) => read(event.target.closest(".t")));
  box.addEventListener("click", (event) => { const token = event.target.closest(".t"); if (token) move(box.querySelector('[tabindex="0"]'), Number(token.dataset.index)); });
  box.addEventListener("keydown", (event) => {
    const token = event.target.closest(".t");
    if (!token || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = Number(token.dataset.index), marked = [...box.querySelectorAll(".hit")].length ? ".hit" : ".rock";
    const places = [...box.querySelectorAll(marked)].map((item) => Number(item.dataset.index));
    const to = {
      ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: box.children.length - 1,
      ArrowDown: places.find((place) => place > at) ?? at, ArrowUp: places.filter((place) => place < at).pop() ?? at,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(token, to);
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.key === "j" || event.key === "n") page(1);
    else if (event.key === "k" || event.key === "p") page(-1);
    else if (event.key === "/") { event.preventDefault(); $("search").focus(); }
  });
  $("previous").addEventListener("click", () => page(-1));
  $("next").addEventListener("click", () => page(1));
  $("search").addEventListener("input", filter);
  for (const id of ["cluster", "type", "answered"]) $(id).addEventListener("change", filter);
  $("column").addEventListener("change", () => { state.column = $("column").value; render(); });
  $("clear").addEventListener("click", () => { for (const id of ["search", "cluster", "type", "answered"]) $(id).value = ""; filter(); });

  // Choices of the filters, from the data.
  const option = (select, value, text) => { const item = element("option", text); item.value = value; select.append(item); };
  [...new Set(data.types.map((type) => type.cluster))].sort().forEach((name) => option($("cluster"), name, name));
  data.types.map((type, index) => ({ type, index })).sort((a, b) => (b.type.rock - a.type.rock) || (a.type.text < b.type.text ? -1 : 1))
    .forEach(({ type, index }) => option($("type"), index, `${type.rock ? "◆ " : ""}${type.text}`));
  const columns = new Set(data.rollouts.flatMap((rollout) => Object.keys(rollout.columns)));
  for (const key of ["kl", "kl_pre", "student_entropy", "teacher_entropy", "grad_norm"]) if (columns.has(key)) option($("column"), key, data.titles[key]);
  filter();
})();
