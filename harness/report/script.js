"use strict";
// Reads the bars already on the page; without scripts every bar still has its own tooltip.
document.querySelectorAll("svg.timeline").forEach((svg) => {
  const readout = svg.closest("figure").querySelector(".readout");
  const store = svg.closest("figure").querySelector("script[type='application/json']");
  if (!readout || !store) return;
  const resting = readout.textContent;
  const { unit, steps, bars } = JSON.parse(store.textContent);
  const left = Number(svg.dataset.left), scale = Number(svg.dataset.scale), end = Number(svg.dataset.end);
  const cursor = svg.querySelector(".t-cursor");
  const stepAt = (t) => {
    let low = 0, high = steps.length;
    while (low < high) { const middle = (low + high) >> 1; if (steps[middle][0] <= t) low = middle + 1; else high = middle; }
    const step = steps[low - 1];
    return step && t < step[1] ? step : null;
  };
  svg.addEventListener("pointermove", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const t = (point.x - left) / scale;
    if (t < 0 || t > end) return;
    cursor.setAttribute("x1", point.x);
    cursor.setAttribute("x2", point.x);
    const step = stepAt(t);
    const flying = bars.filter((bar) => bar[1] <= t && t < bar[2]).map((bar) => bar[0]);
    const batch = step ? `n = ${step[2]} in bucket ${step[3]}` : steps.length ? "no decode step" : "step times not recorded";
    readout.textContent = `${t.toFixed(3)} ${unit}: ${batch}; in flight: ${flying.length ? "sessions " + flying.join(", ") : "none"}`;
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
    readout.textContent = resting;
  });
});
