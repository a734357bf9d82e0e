"use strict";
// The rollout viewer. Every text is set as text, never as HTML: tokens and prompts come from strangers.
(async () => {
  const packed = document.getElementById("viewer-packed")?.textContent.trim();
  if (!packed) return;
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement;
  let data;
  try {
    const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    data = JSON.parse(await new Response(stream).text());
  } catch (error) {
    $("tokens").textContent = "This browser cannot unpack the rollouts.";
    return;
  }
  (window.rocktokens ??= {}).viewer = data;
  const box = $("tokens"), panel = $("panel"), strip = $("strip");
  const levels = [0.01, 0.03, 0.1, 0.3, 1, 3];
  const last = String(data.steps[data.steps.length - 1]);
  const state = { found: [], at: 0, column: "kl", step: last, other: -1, token: 0, quiet: true };

  const level = (value) => value === null || value === undefined ? "lx" : "l" + levels.filter((edge) => value >= edge).length;
  const show = (value) => value === null || value === undefined ? "not measured" : String(value).replace("-", "−");
  const element = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const option = (select, value, text) => { const item = element("option", text); item.value = value; select.append(item); };

  // Text of every rollout with the place of each token in it, for searching; its cost, for sorting.
  const mean = (values) => { const known = values.filter((value) => value !== null && value !== undefined); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : -Infinity; };
  for (const [source, rollouts] of [["rollouts", data.rollouts], ["census", data.census]]) {
    rollouts.forEach((rollout, index) => {
      let text = "";
      rollout.starts = rollout.tokens.map((type) => { const start = text.length; text += data.types[type].flow.toLowerCase(); return start; });
      rollout.text = text;
      rollout.index = index;
      rollout.source = source;
      const kl = rollout.columns.kl ?? [];
      rollout.cost = mean(kl);
      rollout.total = kl.length ? kl.reduce((a, b) => a + (b ?? 0), 0) : -Infinity;
      rollout.surprise = -mean(rollout.columns.teacher_logprob ?? []);
      if (!Number.isFinite(rollout.surprise)) rollout.surprise = -Infinity;
    });
  }

  // The columns of a rollout under the chosen checkpoint; the teacher's are the same under every one.
  function columns(rollout) {
    if (state.step === last) return rollout.columns;
    const own = rollout.steps[state.step];
    if (!own) return {};
    const teacher = Object.fromEntries(Object.entries(rollout.columns).filter(([key]) => key.startsWith("teacher") || key === "kl_pre"));
    return { ...teacher, ...own };
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

  function filter(keep) {
    const answer = $("answered").value, order = $("order").value;
    const shown = state.found[state.at]?.rollout;
    state.found = data[$("source").value || "rollouts"].map((rollout) => ({ rollout, hits: hitsOf(rollout) })).filter(({ rollout, hits }) =>
      hits && (answer === "" || String(rollout.correct) === answer));
    if (order) state.found.sort((a, b) => (b.rollout[order] - a.rollout[order]) || a.rollout.index - b.rollout.index);
    const place = keep === true ? state.found.findIndex(({ rollout }) => rollout === shown) : -1;
    state.at = Math.max(place, 0);
    state.other = -1;
    render();
  }

  function render(focus) {
    box.replaceChildren();
    strip.replaceChildren();
    const total = state.found.length;
    $("previous").disabled = state.at <= 0;
    $("next").disabled = state.at >= total - 1;
    $("other-label").hidden = true;
    if (!total) {
      $("count").textContent = "No rollout matches";
      $("prompt").textContent = "";
      $("outcome").textContent = "";
      panel.replaceChildren();
      box.append(element("p", "No rollout matches these filters. The page holds some of the rollouts; `rocktokens view` pages through all of them.", "empty"));
      return;
    }
    const { rollout, hits } = state.found[state.at];
    const marked = hits.size ? `, ${hits.size} marked` : "";
    $("count").textContent = `Rollout ${state.at + 1} of ${total}${marked}`;
    $("prompt").textContent = rollout.prompt ?? `Prompt of ${rollout.id}: its text was not recorded`;
    continuations(rollout);
    const other = rollout.others?.[state.other];
    const right = other ? other.correct : rollout.correct;
    const judged = right === null ? "Not checked" : right ? "Right" : "Wrong";
    const cut = rollout.truncated && !other ? ", cut at the length limit" : "";
    const tokens = other ? other.tokens : rollout.tokens;
    const part = rollout.length > rollout.tokens.length && !other ? `, first ${rollout.tokens.length} shown` : "";
    $("outcome").textContent = `${judged}${rollout.answer !== null ? " (reference " + rollout.answer + ")" : ""} · ${rollout.id} · ${other ? tokens.length : rollout.length} positions${cut}${part}` +
      (other ? ` · ${other.title}, other from position ${other.at} on` : "");
    const values = other ? [] : columns(rollout)[state.column] ?? [];
    const scored = !other && rollout.source === "rollouts";
    tokens.forEach((type, index) => {
      const token = element("span", data.types[type].flow, scored ? `t ${level(values[index])}` : "t");
      if (data.types[type].rock) token.classList.add("rock");
      if (other && index >= other.at) token.classList.add("other");
      if (!other && hits.has(index)) token.classList.add("hit");
      token.tabIndex = -1;
      token.dataset.index = index;
      token.setAttribute("role", "button");
      token.setAttribute("aria-label", `${data.types[type].text}${data.types[type].rock ? ", rock" : ""}${scored ? `, ${show(values[index])} nats` : ""}`);
      box.append(token);
    });
    if (scored) losses(rollout, values);
    strip.toggleAttribute("hidden", !scored);
    const first = focus !== undefined ? box.children[focus] : box.querySelector(".hit") ?? box.querySelector(".rock") ?? box.firstElementChild;
    const start = first ?? box.firstElementChild;
    if (start) { start.tabIndex = 0; read(start); }
  }

  function continuations(rollout) {
    $("other-label").hidden = !rollout.others?.length;
    const select = $("other");
    select.replaceChildren();
    if (!rollout.others?.length) return;
    option(select, -1, "as sampled");
    rollout.others.forEach((other, index) => option(select, index, `${other.title}: ${other.correct === null ? "not checked" : other.correct ? "right" : "wrong"}`));
    select.value = state.other;
  }

  // A bar per position, as high as the square root of its loss, so that small ones can be seen beside large ones.
  const svg = (tag, values) => { const made = document.createElementNS(strip.namespaceURI, tag); for (const [key, value] of Object.entries(values)) made.setAttribute(key, value); return made; };
  function losses(rollout, values) {
    const known = values.filter((value) => value !== null), most = Math.max(...known.map(Math.abs), 1e-9), width = 600 / Math.max(values.length, 1);
    values.forEach((value, index) => {
      if (value === null) return;
      const height = Math.max(0.6, 38 * Math.sqrt(Math.abs(value) / most));
      strip.append(svg("rect", { x: (index * width).toFixed(2), y: (40 - height).toFixed(2), width: Math.max(width * 0.86, 0.4).toFixed(2), height: height.toFixed(2), class: data.types[rollout.tokens[index]].rock ? "bar rock" : "bar", "data-index": index }));
    });
    strip.append(svg("rect", { x: 0, y: 0, width: width.toFixed(2), height: 40, class: "here" }));
  }

  function top(rollout, index) {
    const found = rollout.top;
    if (!found || state.other >= 0) return null;
    const table = element("table", undefined, "top"), head = element("tr"), own = found.student[state.step];
    table.append(element("caption", "Most probable here"));
    for (const title of ["student", "p", "teacher", "p"]) head.append(element("th", title));
    table.append(head);
    const cells = (side, at) => {
      if (!side) return [element("td", "not kept"), element("td", "")];
      const type = side.ids[at], logprob = side.logprobs[at], name = element("td", data.types[type].text, "name");
      if (type === rollout.tokens[index]) name.classList.add("taken");
      if (data.types[type].rock) name.classList.add("rock");
      const p = element("td", logprob === null ? "0" : percent(Math.exp(logprob)));
      p.dataset.logprob = logprob;
      p.dataset.token = data.types[type].id;
      p.title = `log-probability ${show(logprob)}`;
      return [name, p];
    };
    for (let place = 0; place < found.k; place++) {
      const row = element("tr"), at = index * found.k + place;
      row.append(...cells(own, at), ...cells(found.teacher, at));
      table.append(row);
    }
    return table;
  }
  const percent = (p) => p >= 0.1 ? `${(100 * p).toFixed(0)} %` : p >= 0.001 ? `${(100 * p).toFixed(1)} %` : "<0.1 %";

  function read(token) {
    if (!token?.dataset?.index) return;
    const { rollout } = state.found[state.at], index = Number(token.dataset.index);
    const other = rollout.others?.[state.other], tokens = other ? other.tokens : rollout.tokens, type = data.types[tokens[index]];
    state.token = index;
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
    row("rock", type.rock ? `yes, by ${data.definition}` : type.class ?? "no", "rock");
    const own = other ? {} : columns(rollout);
    for (const [key, title] of Object.entries(data.titles)) if (own[key]) row(title, show(own[key][index]), key);
    if (type.verdict) row("banned at inference", type.verdict, "verdict");
    const spelled = Object.entries(rollout.spells).map(([start, text]) => [Number(start), text]).filter(([start]) => start <= index).pop();
    const isPart = spelled && rollout.tokens.slice(spelled[0], index + 1).every((part) => data.types[part].text.includes("\ufffd"));
    if (isPart) row("part of", spelled[1], "spells");
    const best = top(rollout, index);
    panel.replaceChildren(element("div", type.text, "what"), ...(best ? [best] : []), list);
    const here = strip.querySelector(".here");
    if (here) here.setAttribute("x", (index * 600 / Math.max(tokens.length, 1)).toFixed(2));
    remember();
  }

  // Where the reader is, in the address: a link that opens the same token under the same checkpoint.
  function fragment() {
    const rollout = state.found[state.at]?.rollout;
    if (!rollout) return "";
    const parts = { rollout: rollout.id, position: rollout.positions ? rollout.positions[state.token] : state.token };
    if (state.step !== last) parts.step = state.step;
    if (state.column !== "kl") parts.colour = state.column;
    if ($("type").value !== "") parts.type = data.types[Number($("type").value)].id;
    if (rollout.source === "census") parts.source = "census";
    if (state.other >= 0) parts.continued = state.other;
    return "#viewer:" + new URLSearchParams(parts).toString();
  }
  function remember() {
    if (state.quiet) return;
    try { history.replaceState(null, "", fragment()); } catch { /* a sandboxed page has no history */ }
  }
  function follow() {
    if (!location.hash.startsWith("#viewer:")) return false;
    const wanted = new URLSearchParams(location.hash.slice("#viewer:".length));
    for (const id of ["search", "cluster", "answered", "type"]) $(id).value = "";
    $("source").value = wanted.get("source") === "census" && data.census.length ? "census" : "rollouts";
    if (wanted.has("step") && data.steps.includes(Number(wanted.get("step")))) setStep(data.steps.indexOf(Number(wanted.get("step"))));
    if (wanted.has("colour") && data.titles[wanted.get("colour")]) { state.column = wanted.get("colour"); $("column").value = state.column; }
    if (wanted.has("type")) {
      const place = data.types.findIndex((type) => String(type.id) === wanted.get("type"));
      if (place >= 0) {
        if (![...$("type").options].some((item) => item.value === String(place))) option($("type"), place, data.types[place].text);
        $("type").value = String(place);
      }
    }
    state.quiet = true;
    filter();
    if (wanted.has("rollout")) {
      const at = state.found.findIndex(({ rollout }) => rollout.id === wanted.get("rollout"));
      if (at >= 0) {
        state.at = at;
        const rollout = state.found[at].rollout, position = Number(wanted.get("position") ?? 0);
        if (wanted.has("continued") && rollout.others?.[Number(wanted.get("continued"))]) state.other = Number(wanted.get("continued"));
        render(rollout.positions ? rollout.positions.indexOf(position) : position);
      }
    }
    state.quiet = false;
    const target = box.querySelector('[tabindex="0"]');
    $("viewer").scrollIntoView();
    target?.focus({ preventScroll: false });
    return true;
  }

  function setStep(place) {
    place = Math.max(0, Math.min(data.steps.length - 1, place));
    $("step").value = place;
    state.step = String(data.steps[place]);
    $("step-name").textContent = `step ${state.step}`;
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
    state.other = -1;
    render();
  }

  box.addEventListener("mouseover", (event) => read(event.target.closest(".t")));
  box.addEventListener("focusin", (event) => read(event.target.closest(".t")));
  box.addEventListener("click", (event) => { const token = event.target.closest(".t"); if (token) move(box.querySelector('[tabindex="0"]'), Number(token.dataset.index)); });
  strip.addEventListener("click", (event) => {
    const { left, width } = strip.getBoundingClientRect();
    move(box.querySelector('[tabindex="0"]'), Math.floor((event.clientX - left) / width * box.children.length));
  });
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
  const step = (place) => { const focused = box.contains(document.activeElement); setStep(place); render(state.token); if (focused) box.children[state.token]?.focus(); };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.key === "j" || event.key === "n") page(1);
    else if (event.key === "k" || event.key === "p") page(-1);
    else if (event.key === "[") step(Number($("step").value) - 1);
    else if (event.key === "]") step(Number($("step").value) + 1);
    else if (event.key === "/") { event.preventDefault(); $("search").focus(); }
  });
  $("previous").addEventListener("click", () => page(-1));
  $("next").addEventListener("click", () => page(1));
  $("search").addEventListener("input", filter);
  for (const id of ["cluster", "type", "answered", "source"]) $(id).addEventListener("change", filter);
  $("order").addEventListener("change", () => filter());
  $("column").addEventListener("change", () => { state.column = $("column").value; render(state.token); });
  $("other").addEventListener("change", () => { state.other = Number($("other").value); render(); });
  $("step").addEventListener("input", () => step(Number($("step").value)));
  $("clear").addEventListener("click", () => { for (const id of ["search", "cluster", "type", "answered", "order"]) $(id).value = ""; filter(); });
  $("link").addEventListener("click", async () => {
    const address = location.href.split("#")[0] + fragment();
    $("link").dataset.copied = address;
    try { await navigator.clipboard.writeText(address); $("link").textContent = "Copied"; } catch { location.hash = fragment(); $("link").textContent = "The address bar has it"; }
  });
  addEventListener("hashchange", follow);

  // Choices of the filters, from the data.
  [...new Set(data.types.map((type) => type.cluster))].sort().forEach((name) => option($("cluster"), name, name));
  const used = new Set([...data.rollouts, ...data.census].flatMap((rollout) => rollout.tokens));
  data.types.map((type, index) => ({ type, index })).filter(({ index }) => used.has(index)).sort((a, b) => (b.type.rock - a.type.rock) || (a.type.text < b.type.text ? -1 : 1))
    .forEach(({ type, index }) => option($("type"), index, `${type.rock ? "◆ " : ""}${type.text}`));
  const measured = new Set(data.rollouts.flatMap((rollout) => Object.keys(rollout.columns)));
  for (const key of ["kl", "kl_pre", "log_ratio", "student_entropy", "teacher_entropy", "grad_norm"]) if (measured.has(key)) option($("column"), key, data.titles[key]);
  $("source-label").hidden = !data.census.length;
  $("step-label").hidden = data.steps.length < 2;
  $("step").max = data.steps.length - 1;
  setStep(data.steps.length - 1);
  filter();
  state.quiet = false;
  follow();
  root.dataset.viewer = "yes";
})();
