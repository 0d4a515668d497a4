// Sorts a table by the column whose head is pressed: numbers from the largest, words from A, and round when pressed again.
"use strict";

{
  function sort(table, head, column) {
    const words = head.classList.contains("words");
    const before = head.getAttribute("aria-sort");
    const down = before ? before === "ascending" : !words;
    for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const by = (row) => row.cells[column].dataset.by;
    const compare = words ? (x, y) => x.localeCompare(y) : (x, y) => x - y;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [by(a), by(b)];
      if (!x || !y) return !x - !y;
      return down ? compare(y, x) : compare(x, y);
    });
    table.tBodies[0].append(...rows);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.firstElementChild.addEventListener("click", () => sort(table, head, column));
    });
  }
}
