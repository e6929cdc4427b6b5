"use strict";
// Reads and zooms the timelines that are already on the page; without scripts every bar still has its own tooltip.
(() => {
  const SVG = document.querySelector("svg.timeline")?.namespaceURI;
  const niceStride = (span) => {
    const rough = span / 10, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((factor) => factor * power).find((stride) => stride >= rough * (1 - 1e-9));
  };
  const stepAt = (steps, t) => {
    let low = 0, high = steps.length;
    while (low < high) { const middle = (low + high) >> 1; if (steps[middle][0] <= t) low = middle + 1; else high = middle; }
    return low && t < steps[low - 1][1] ? steps[low - 1] : null;
  };
  const timelines = [];
  const attach = (svg) => {
    const figure = svg.closest("figure");
    const readout = figure.querySelector(".readout"), store = figure.querySelector("script[type='application/json']");
    const { unit, steps, bars } = JSON.parse(store.textContent), resting = readout.textContent;
    const [left, width, end, top, bottom] = ["left", "width", "end", "top", "bottom"].map((key) => Number(svg.dataset[key]));
    const view = svg.querySelector(".t-view"), ticks = svg.querySelector(".t-ticks"), hatch = svg.querySelector("pattern");
    const cursor = svg.querySelector(".t-cursor"), selection = svg.querySelector(".t-select");
    const home = view.getAttribute("viewBox").split(" ").map(Number);
    const self = { end, from: 0, to: end };
    let dragged = null;

    self.zoom = (from, to) => {
      self.from = from;
      self.to = to;
      view.setAttribute("viewBox", [left + from / end * width, home[1], (to - from) / end * width, home[3]].join(" "));
      const stride = niceStride(to - from), decimals = Math.max(0, -Math.floor(Math.log10(stride) + 1e-9));
      // The window stretches what it shows; the hatching alone must not be stretched with it.
      hatch.setAttribute("patternTransform", `scale(${(to - from) / end} 1) rotate(45)`);
      ticks.replaceChildren();
      for (let index = Math.ceil(from / stride - 1e-9); index * stride <= to + 1e-9 * stride; index += 1) {
        const x = left + (index * stride - from) / (to - from) * width;
        const line = document.createElementNS(SVG, "line"), text = document.createElementNS(SVG, "text");
        Object.entries({ class: "t-grid", x1: x, x2: x, y1: top, y2: bottom }).forEach((pair) => line.setAttribute(...pair));
        Object.entries({ class: "t-tick", x, y: bottom + 13, "text-anchor": "middle" })
          .forEach((pair) => text.setAttribute(...pair));
        text.textContent = (index * stride).toFixed(decimals);
        ticks.append(line, text);
      }
    };
    // Timelines that share an axis are zoomed together, so that they stay comparable.
    const zoomAll = (from, to) => timelines.filter((other) => other.end === end).forEach((other) => other.zoom(from, to));
    const place = (event) => {
      const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
      return Math.min(left + width, Math.max(left, x));
    };
    const time = (x) => self.from + (x - left) / width * (self.to - self.from);

    svg.classList.add("zoomable");
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) { dragged = place(event); svg.setPointerCapture(event.pointerId); }
    });
    svg.addEventListener("pointermove", (event) => {
      const x = place(event), t = time(x);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      if (dragged !== null) {
        selection.setAttribute("x", Math.min(x, dragged));
        selection.setAttribute("width", Math.abs(x - dragged));
      }
      const flying = bars.filter((bar) => bar[1] <= t && t < bar[2]).map((bar) => bar[0]);
      const batch = steps.map((own, replica) => {
        const step = stepAt(own, t), of = steps.length > 1 ? `replica ${replica}: ` : "";
        return of + (step ? `n = ${step[2]} in bucket ${step[3]}` : own.length ? "no decode step" : "step times not recorded");
      }).join("; ");
      readout.textContent = `${t.toFixed(3)} ${unit}: ${batch}; in flight: ${flying.length ? "sessions " + flying.join(", ") : "none"}`;
    });
    svg.addEventListener("pointerup", (event) => {
      const x = place(event);
      if (dragged !== null && Math.abs(x - dragged) > 4) zoomAll(...[time(dragged), time(x)].sort((a, b) => a - b));
      dragged = null;
      selection.setAttribute("width", 0);
    });
    svg.addEventListener("dblclick", () => zoomAll(0, end));
    svg.addEventListener("pointerleave", () => {
      cursor.setAttribute("x1", -9);
      cursor.setAttribute("x2", -9);
      readout.textContent = resting;
    });
    self.svg = svg;
    timelines.push(self);
  };
  document.querySelectorAll("svg.timeline").forEach(attach);

  // The other replicates lie in templates, which cost nothing until one is chosen; what is shown goes back into one.
  const choose = (anchor) => {
    const wanted = document.getElementById(anchor);
    if (!wanted) return;
    if (wanted.localName === "template") {
      let figure = wanted;
      while (figure && !figure.matches("figure.lanes")) figure = figure.previousElementSibling;
      const kept = document.createElement("template");
      kept.id = figure.id;
      timelines.splice(timelines.findIndex((one) => figure.contains(one.svg)), 1);
      kept.content.append(...figure.childNodes);
      figure.append(wanted.content);
      wanted.replaceWith(kept);
      figure.id = anchor;
      attach(figure.querySelector("svg.timeline"));
      const select = [...document.querySelectorAll(".choose option")].find((option) => option.value === anchor);
      if (select) select.parentElement.value = anchor;
    }
  };
  document.querySelectorAll(".choose select").forEach((select) => {
    select.addEventListener("change", () => choose(select.value));
  });
  document.querySelectorAll(".choose").forEach((line) => { line.hidden = false; });
  const follow = () => {
    const anchor = decodeURIComponent(location.hash.slice(1));
    if (!anchor) return;
    if (anchor.startsWith("timeline-")) choose(anchor);
    const target = document.getElementById(anchor);
    target?.closest("details")?.setAttribute("open", "");
    target?.scrollIntoView({ block: "start" });
  };
  window.addEventListener("hashchange", follow);
  follow();

  // Paper has nothing to unfold.
  let unfolded = [];
  window.addEventListener("beforeprint", () => {
    unfolded = [...document.querySelectorAll("details.section:not([open])")];
    unfolded.forEach((box) => { box.open = true; });
  });
  window.addEventListener("afterprint", () => { unfolded.forEach((box) => { box.open = false; }); });

  // A table is copied as text with tabs, which spreadsheets and editors take.
  document.querySelectorAll(".scroll > table").forEach((table) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "copy";
    button.setAttribute("aria-label", "copy this table");
    button.addEventListener("click", async () => {
      const rows = [...table.rows].map((row) => [...row.cells]
        .flatMap((cell) => [cell.innerText.replace(/\s+/g, " ").trim(), ...Array(cell.colSpan - 1).fill("")]).join("\t"));
      try {
        await navigator.clipboard.writeText(rows.join("\n"));
        button.textContent = "copied";
      } catch {
        button.textContent = "the browser refuses";
      }
      setTimeout(() => { button.textContent = "copy"; }, 2000);
    });
    table.parentElement.before(button);
  });
  // What runs on beyond its edge says so.
  const cue = () => document.querySelectorAll(".scroll, pre").forEach((box) => {
    box.classList.toggle("more", box.scrollWidth - box.clientWidth - box.scrollLeft > 4);
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  });
  document.querySelectorAll(".scroll").forEach((box) => box.addEventListener("scroll", cue, { passive: true }));
  window.addEventListener("resize", cue);
  document.querySelectorAll("details").forEach((box) => box.addEventListener("toggle", cue));
  cue();
  document.querySelectorAll(".hint").forEach((hint) => { hint.hidden = false; });
})();
