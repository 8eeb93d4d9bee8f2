// For keyboards and screen readers: code and tables that scroll sideways take the focus, each copy button
// has a name of its own, and an empty corner of a table is no heading.
document$.subscribe(() => {
  for (const part of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap")) part.tabIndex = 0;
  document.querySelectorAll(".md-code__nav").forEach((nav, n) => nav.setAttribute("aria-label", `Code ${n + 1}`));
  for (const corner of document.querySelectorAll("th:empty")) corner.replaceWith(document.createElement("td"));
});
