// What the theme adds later, for readers by keyboard and screen reader: parts of a block or list are no landmarks.
new MutationObserver(() => {
  document.querySelectorAll(".md-code__nav:not([role]), .md-nav--secondary .md-nav:not([role])").forEach((part) => {
    part.removeAttribute("aria-label");
    part.setAttribute("role", "presentation");
  });
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])").forEach((wrap) => wrap.setAttribute("tabindex", "0"));
}).observe(document.body, { childList: true, subtree: true });
document.querySelector(".md-search").setAttribute("aria-label", "Search");
