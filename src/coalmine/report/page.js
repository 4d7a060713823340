"use strict";
(() => {
  const tip = document.getElementById("tip");
  let owner = null;

  function hide() {
    if (owner) owner.removeAttribute("aria-describedby");
    owner = null;
    tip.hidden = true;
  }

  function show(term) {
    const words = document.getElementById(term.dataset.term);
    if (!words) return;
    hide();
    owner = term;
    tip.textContent = words.textContent;
    tip.hidden = false;
    term.setAttribute("aria-describedby", "tip");
    place();
  }

  function place() {
    const at = owner.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8));
    const below = at.bottom + 6 + tip.offsetHeight < innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - tip.offsetHeight - 6)}px`;
  }

  for (const term of document.querySelectorAll("[data-term]")) {
    term.addEventListener("mouseenter", () => show(term));
    const leave = () => { if (owner === term) hide(); };
    term.addEventListener("mouseleave", leave);
    term.addEventListener("focus", () => show(term));
    term.addEventListener("blur", leave);
    if (term.tagName === "A") term.addEventListener("click", (event) => { event.preventDefault(); show(term); });
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", () => {
    if (owner && owner === document.activeElement) place(); // focusing a term scrolls it into view
    else hide();
  }, { capture: true, passive: true });

  function value(row, column) {
    const cell = row.cells[column];
    const number = parseFloat(cell.dataset.value);
    return Number.isNaN(number) ? cell.textContent.trim() : number;
  }

  function compare(a, b, sign) {
    if (typeof a === "number" && typeof b === "number") return a === b ? 0 : sign * (a - b);
    if (typeof a === "number") return -1; // cells without a number stay last in both directions
    if (typeof b === "number") return 1;
    return sign * a.localeCompare(b);
  }

  for (const button of document.querySelectorAll("th[aria-sort] button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const body = head.closest("table").tBodies[0];
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentElement.cells) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const column = head.cellIndex;
      body.append(...[...body.rows].sort((a, b) => compare(value(a, column), value(b, column), up ? 1 : -1)));
    });
  }

  for (const part of document.querySelectorAll(".scroll")) {
    if (part.scrollWidth <= part.clientWidth) part.removeAttribute("tabindex"); // no tab stop where nothing scrolls
  }

  addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
})();
