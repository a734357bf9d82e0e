"use strict";
// Draws the figures, in the colours of the page's theme, and makes every point reachable by keyboard.
(() => {
  const root = document.documentElement;
  const report = JSON.parse(document.getElementById("report-data").textContent);
  window.rocktokens = { report };
  const charts = [...document.querySelectorAll(".chart[data-figure]")];
  const specs = new Map(report.figures.map((spec) => [spec.name, spec]));
  const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false };
  let printing = false;

  // Theme: the reader's system decides until the button is pressed; storage may be closed to a file from disk.
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = (() => { try { return localStorage.getItem("rocktokens-theme"); } catch { return null; } })();
  let chosen = stored === "dark" || stored === "light" ? stored : null;
  function applyTheme() {
    const dark = !printing && (chosen ?? (system.matches ? "dark" : "light")) === "dark";
    root.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-label", dark ? "Switch to light colours" : "Switch to dark colours");
  }
  button.addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("rocktokens-theme", chosen); } catch { /* from disk: not remembered */ }
    applyTheme();
    redraw();
  });
  system.addEventListener("change", () => { applyTheme(); redraw(); });
  applyTheme();

  function painted(value, style) {
    if (typeof value === "string" && value.startsWith("@")) return style.getPropertyValue("--" + value.slice(1)).trim();
    if (Array.isArray(value)) return value.map((item) => painted(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, painted(item, style)]));
    }
    return value;
  }

  function drawing(spec, width) {
    const style = getComputedStyle(root);
    const { data, layout } = painted({ data: spec.data, layout: spec.layout }, style);
    const ink = style.getPropertyValue("--ink").trim(), paper = style.getPropertyValue("--paper").trim();
    const narrow = width < 520;
    layout.font = { family: style.getPropertyValue("--sans"), size: narrow ? 11 : 13, color: ink };
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.hoverlabel = { bgcolor: ink, bordercolor: ink, font: { color: paper, size: 13 }, align: "left" };
    const muted = style.getPropertyValue("--muted").trim();
    for (const axis of [layout.xaxis, layout.yaxis]) axis.title.font = { size: narrow ? 11 : 12.5, color: muted };
    layout.width = width;
    layout.margin = { ...layout.margin, ...(narrow ? { l: 44, r: 8 } : {}) };
    if (narrow) layout.height = Math.round(layout.height * 1.12);
    return { data, layout };
  }

  const widthOf = (chart) => Math.max(240, printing ? 680 : chart.clientWidth - 14);

  async function draw(chart) {
    const spec = specs.get(chart.dataset.figure);
    const { data, layout } = drawing(spec, widthOf(chart));
    chart.querySelector(".waiting")?.remove();
    await window.Plotly.react(chart.firstElementChild ?? chart.appendChild(document.createElement("div")), data, layout, config);
  }
  async function redraw() {
    if (!window.Plotly) return;
    for (const chart of charts) await draw(chart);
    drawn();
  }
  const drawn = () => { root.dataset.drawn = `${root.dataset.theme} ${innerWidth}`; };

  // Plotly travels compressed; its hash is in the page's policy, so nothing else can take its place.
  async function unpack() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly-packed").textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    // The bundle brings a stylesheet for maps and adds it unless an element with its id is there. We draw no maps, and
    // the page's policy knows no stylesheet but its own.
    for (const [, id] of script.textContent.matchAll(/getElementById\("([0-9a-f]{64})"\)/g)) {
      document.head.append(Object.assign(document.createElement("template"), { id }));
    }
    document.head.append(script);
  }

  // Keyboard: left and right from point to point, up and down from series to series.
  const entities = { "&lt;": "<", "&gt;": ">", "&#36;": "$", "&#64;": "@", "&amp;": "&" };
  const plain = (label) => label.replace(/<br>/g, ", ").replace(/&(lt|gt|#36|#64|amp);/g, (entity) => entities[entity]);
  function keyboard(chart) {
    const line = chart.nextElementSibling;
    let series = 0, point = -1;
    chart.addEventListener("keydown", (event) => {
      const graph = chart.firstElementChild;
      const shown = specs.get(chart.dataset.figure).data.map((trace, index) => ({ trace, index })).filter(({ trace }) => trace.text);
      if (!shown.length || !graph) return;
      const size = () => shown[series].trace.text.length;
      if (event.key === "ArrowRight") point = Math.min(point + 1, size() - 1);
      else if (event.key === "ArrowLeft") point = Math.max(point - 1, 0);
      else if (event.key === "ArrowDown") { series = (series + 1) % shown.length; point = Math.min(Math.max(point, 0), size() - 1); }
      else if (event.key === "ArrowUp") { series = (series + shown.length - 1) % shown.length; point = Math.min(Math.max(point, 0), size() - 1); }
      else if (event.key === "Escape") { window.Plotly.Fx.unhover(graph); line.textContent = ""; return; }
      else return;
      event.preventDefault();
      const { trace, index } = shown[series];
      line.textContent = plain(trace.text[point]);
      try { window.Plotly.Fx.hover(graph, [{ curveNumber: index, pointNumber: point }]); } catch { /* the line says it */ }
    });
    chart.addEventListener("blur", () => { if (chart.firstElementChild && window.Plotly) window.Plotly.Fx.unhover(chart.firstElementChild); });
  }

  async function save(name, format) {
    const { data, layout } = drawing(specs.get(name), 760);
    const style = getComputedStyle(root);
    layout.paper_bgcolor = style.getPropertyValue("--paper").trim();
    const url = await window.Plotly.toImage({ data, layout }, { format, width: 760, height: layout.height, scale: format === "png" ? 2 : 1 });
    const link = Object.assign(document.createElement("a"), { href: url, download: `${name}.${format}` });
    link.click();
  }

  async function start() {
    try { await unpack(); } catch (error) {
      for (const chart of charts) chart.querySelector(".waiting").textContent = "This browser cannot unpack the charts; the CSV files hold every number.";
      root.dataset.ready = "without charts";
      return;
    }
    for (const chart of charts) { await draw(chart); keyboard(chart); }
    for (const item of document.querySelectorAll("[data-save]")) {
      item.addEventListener("click", () => save(item.dataset.figure, item.dataset.save));
    }
    drawn();
    root.dataset.ready = "yes";
  }
  let wait = 0;
  addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(redraw, 150); });
  // A chart in a closed part has no width; it is drawn anew when the part is opened.
  for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", () => { if (part.open) redraw(); });
  addEventListener("beforeprint", () => { printing = true; applyTheme(); redraw(); });
  addEventListener("afterprint", () => { printing = false; applyTheme(); redraw(); });
  matchMedia("print").addEventListener("change", ({ matches }) => { printing = matches; applyTheme(); redraw(); });
  start();
})();
