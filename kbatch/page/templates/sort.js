"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const headers = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const valueOf = (row, column) => row.cells[column].dataset.sort;
  const compare = (a, b, numeric) => (numeric ? Number(a) - Number(b) : a.localeCompare(b));
  headers.forEach((header, column) => {
    const numeric = header.classList.contains("number");
    header.querySelector("button").addEventListener("click", () => {
      const down = header.getAttribute("aria-sort") === "ascending";
      const rows = [...body.rows].sort((first, second) => {
        const a = valueOf(first, column);
        const b = valueOf(second, column);
        // A missing value stays at the end in both directions.
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        return (down ? -1 : 1) * compare(a, b, numeric);
      });
      headers.forEach((other) => other.setAttribute("aria-sort", "none"));
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...rows);
    });
  });
}
