"use strict";
(() => {
  const say = (text) => { document.getElementById("status").textContent = text; };

  // A link to a folded part, or into one, unfolds it.
  const unfold = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const folded = target && target.closest("details");
    if (folded) folded.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });

  // Tables: a head sorts its column up, then down. Cells without a value stay last both ways.
  const collator = new Intl.Collator("en", { numeric: true });
  const keyOf = (cell) => (cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent);
  const isEmpty = (cell) => cell.dataset.value === undefined &&
    (cell.textContent === "" || cell.querySelector(".undefined") !== null);
  const compare = (a, b) => typeof a === "number" && typeof b === "number"
    ? a - b : collator.compare(String(a), String(b));
  for (const button of document.querySelectorAll("th > button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const table = head.closest("table");
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of head.parentElement.children) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const at = head.cellIndex;
      const rows = [...body.rows].map((row, order) => ({ row, order, cell: row.cells[at] }));
      rows.sort((a, b) => (isEmpty(a.cell) - isEmpty(b.cell)) ||
        (down ? -1 : 1) * (isEmpty(a.cell) ? 0 : compare(keyOf(a.cell), keyOf(b.cell))) || a.order - b.order);
      body.append(...rows.map((entry) => entry.row));
      say(`Sorted by ${button.textContent}, ${down ? "descending" : "ascending"}`);
    });
  }

  // What is shown can be saved: a table as CSV in the order it is sorted, a chart as SVG or PNG.
  const save = (url, name) => {
    const link = document.createElement("a");
    link.href = url;
    link.download = name;
    link.click();
    say(`Saved ${name}`);
  };
  const dataUrl = (type, text) => `data:${type};charset=utf-8,${encodeURIComponent(text)}`;
  const buttons = (after, forms) => {
    const place = document.createElement("div");
    place.className = "save";
    for (const [label, action] of forms) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = label;
      button.addEventListener("click", action);
      place.append(button);
    }
    after.after(place);
  };
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const csvCell = (cell, head) => {
    const value = isEmpty(cell) ? "" : String(keyOf(cell));
    return [value, ...(head.dataset.error ? [cell.dataset.error ?? ""] : [])].map(quoted).join(",");
  };
  const csvOf = (table) => [...table.rows]
    .map((row) => [...row.cells].map((cell, at) => csvCell(cell, table.tHead.rows[0].cells[at])).join(","))
    .join("\n");
  for (const table of document.querySelectorAll("table[data-name]")) {
    const name = `${table.dataset.name}.csv`;
    const more = table.tHead.querySelectorAll(".extra").length;
    const showAll = ({ currentTarget }) => {
      table.classList.add("whole");
      currentTarget.remove();
      say("All columns are shown");
    };
    buttons(table.parentElement, [
      ["Save as CSV", () => save(dataUrl("text/csv", `${csvOf(table)}\n`), name)],
      ...(more ? [[`Show ${more} more column${more > 1 ? "s" : ""}`, showAll]] : []),
    ]);
  }
  // A saved picture has no page around it, so it carries the colours that the page's names stand for now.
  const svgOf = (place) => {
    const page = getComputedStyle(document.documentElement);
    const svg = place.querySelector("svg").cloneNode(true);
    svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    svg.removeAttribute("aria-hidden");
    svg.style.background = page.getPropertyValue("--paper");
    const text = new XMLSerializer().serializeToString(svg);
    return text.replace(/var\((--[\w-]+)\)/g, (_, name) => page.getPropertyValue(name));
  };
  const savePng = (place, name) => {
    const { width, height } = place.querySelector("svg").getBoundingClientRect();
    const picture = new Image();
    picture.onload = () => {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [2 * width, 2 * height];
      canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
      save(canvas.toDataURL("image/png"), name);
    };
    picture.src = dataUrl("image/svg+xml", svgOf(place));
  };
  const offerPictures = (place) => {
    const name = place.closest("figure").id;
    buttons(place, [
      ["Save as SVG", () => save(dataUrl("image/svg+xml", svgOf(place)), `${name}.svg`)],
      ["Save as PNG", () => savePng(place, `${name}.png`)],
    ]);
  };

  // Vega-Lite warns that a chart with one bar a row can't fit its height too, which nobody asked for.
  const warn = console.warn.bind(console);
  console.warn = (...words) => { if (!words.join(" ").includes('Dropping "fit-y"')) warn(...words); };

  // Charts: one at a time, so that a page with many of them can be read and scrolled meanwhile.
  const charts = [...document.querySelectorAll(".chart")];
  const options = {
    mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false,
    tooltip: { disableDefaultStyle: true },
  };
  // A legend is one row, unless that is wider than the page: then how many columns to draw it again with.
  const columnsThatFit = (place) => {
    const edge = place.getBoundingClientRect();
    for (const legend of place.querySelectorAll(".role-legend")) {
      const box = legend.getBoundingClientRect();
      const entries = legend.querySelectorAll(".role-legend-label text").length;
      if (box.right > edge.right + 1 && entries > 1) {
        return Math.max(1, Math.floor((entries * (edge.right - box.left)) / box.width));
      }
    }
    return 0;
  };
  const draw = async (place) => {
    try {
      const spec = JSON.parse(document.getElementById(`${place.id}-spec`).textContent);
      const first = await window.vegaEmbed(place, spec, options);
      const columns = columnsThatFit(place);
      if (columns) {
        first.finalize();
        spec.config.legend.columns = columns;
        await window.vegaEmbed(place, spec, options);
      }
      // Vega makes every mark a thing to be read out; the description says more in one sentence.
      place.setAttribute("role", "img");
      place.removeAttribute("aria-roledescription");
      place.querySelector("svg").setAttribute("aria-hidden", "true");
      place.dataset.state = "drawn";
      if (place.closest("figure").id) offerPictures(place);
    } catch (error) {
      place.dataset.state = "failed";
      place.textContent = `This chart could not be drawn: ${error.message}`;
    }
    place.style.minHeight = "";
  };
  const drawAll = async () => {
    for (const place of charts) {
      await draw(place);
      await new Promise((done) => { setTimeout(done, 0); });
    }
    document.documentElement.dataset.charts = "ready";
  };
  drawAll();
})();
