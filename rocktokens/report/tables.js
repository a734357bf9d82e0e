"use strict";
// Tables: sort by a header, filter rows, copy as CSV or token ids, and a cue where columns lie off the edge.
(() => {
  const plain = (cell) => cell.textContent.replace(/[\u00a0\u202f]/g, " ").trim();
  function value(text) {
    const found = text.replace(/(\d)[\s](?=\d{3}\b)/g, "$1").replace(/\u2212/g, "-").match(/^[+]?(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)/i);
    return found ? Number(found[1]) : null;
  }
  function compare(a, b) {
    const left = value(a), right = value(b);
    if (left !== null && right !== null) return left - right;
    if (left === null && right === null) return a < b ? -1 : a > b ? 1 : 0;
    return left === null ? 1 : -1;
  }
  function sort(table, place) {
    const heads = [...table.tHead.rows[0].cells], head = heads[place], body = table.tBodies[0];
    // Numbers are most wanted from the top: the first press on a column of numbers goes down.
    const numbers = [...body.rows].filter((row) => value(plain(row.cells[place])) !== null).length * 2 > body.rows.length;
    const now = head.getAttribute("aria-sort");
    const next = now === "descending" ? "ascending" : now === "ascending" ? "descending" : numbers ? "descending" : "ascending";
    heads.forEach((item) => item.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", next);
    const sign = next === "ascending" ? 1 : -1;
    const rows = [...body.rows].map((row, index) => ({ row, index, text: plain(row.cells[place]) }));
    const known = rows.filter((item) => item.text !== "–" && item.text !== ""), empty = rows.filter((item) => item.text === "–" || item.text === "");
    known.sort((a, b) => sign * compare(a.text, b.text) || a.index - b.index);
    body.append(...[...known, ...empty].map((item) => item.row));
  }
  // A spreadsheet would run what begins like a formula; as in the files, such text is written as JSON.
  const cell = (text) => {
    const safe = /^[=+@\t\r]/.test(text) || (/^-/.test(text) && value(text) === null) ? JSON.stringify(text) : text;
    return /[",\n]/.test(safe) ? '"' + safe.replace(/"/g, '""') + '"' : safe;
  };
  const shown = (table) => [...table.tBodies[0].rows].filter((row) => !row.hidden);
  function text(table, what) {
    if (what === "ids") return shown(table).map((row) => row.dataset.id).filter(Boolean).join(",");
    const head = [...table.tHead.rows[0].cells].map(plain);
    return [head, ...shown(table).map((row) => [...row.cells].map(plain))].map((row) => row.map(cell).join(",")).join("\n") + "\n";
  }
  async function copy(words) {
    try { await navigator.clipboard.writeText(words); return true; } catch { /* a page from disk may have no clipboard */ }
    const area = Object.assign(document.createElement("textarea"), { value: words });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
  function cue(block) {
    const scroll = block.querySelector(".scroll"), button = block.querySelector(".cue");
    const left = scroll.scrollLeft > 2, right = scroll.scrollLeft + scroll.clientWidth < scroll.scrollWidth - 2;
    block.dataset.more = left && right ? "both" : left ? "left" : right ? "right" : "none";
    button.hidden = !right;
  }
  const blocks = [...document.querySelectorAll(".table")];
  for (const block of blocks) {
    const table = block.querySelector("table"), scroll = block.querySelector(".scroll"), tools = block.querySelector(".tools");
    tools.hidden = false;
    [...table.tHead.rows[0].cells].forEach((head, place) => head.querySelector("button")?.addEventListener("click", () => sort(table, place)));
    const said = tools.querySelector("output");
    tools.querySelector(".sift")?.addEventListener("input", (event) => {
      const words = event.target.value.toLowerCase();
      for (const row of table.tBodies[0].rows) row.hidden = words !== "" && !plain(row).toLowerCase().includes(words);
      said.textContent = words ? `${shown(table).length} of ${table.tBodies[0].rows.length} rows` : "";
      cue(block);
    });
    for (const button of tools.querySelectorAll("[data-copy]")) {
      button.addEventListener("click", async () => {
        const words = text(table, button.dataset.copy);
        said.textContent = (await copy(words)) ? "Copied" : "This browser does not let a page copy";
        button.dataset.copied = words;
      });
    }
    block.querySelector(".cue").addEventListener("click", () => scroll.scrollBy({ left: 0.8 * scroll.clientWidth, behavior: "smooth" }));
    scroll.addEventListener("scroll", () => cue(block), { passive: true });
    cue(block);
  }
  for (const item of document.querySelectorAll(".paste")) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "link", textContent: "Copy" });
    button.addEventListener("click", async () => { button.textContent = (await copy(item.textContent)) ? "Copied" : "Select it to copy"; });
    item.after(" ", button);
  }
  addEventListener("resize", () => blocks.forEach(cue));
  for (const item of document.querySelectorAll("details")) item.addEventListener("toggle", () => blocks.forEach(cue));
  // Served by `rocktokens view`, the report leads to what only the server has.
  const served = document.getElementById("served");
  if (served && location.protocol === "http:" && location.pathname.startsWith("/run/")) served.hidden = false;
})();
