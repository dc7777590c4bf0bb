"use strict";
// Live updates of the list of requests, and the columns' names for narrow windows.
function label(table) {
  const names = [...table.tHead.rows[0].cells].map((head) => head.textContent);
  for (const row of table.tBodies[0].rows) {
    if (row.cells.length === names.length) names.forEach((name, place) => (row.cells[place].dataset.label = name));
  }
  table.classList.add("labeled");
}

async function refresh() {
  const shown = (row) => row.querySelector("a")?.href;
  const body = document.querySelector("#requests tbody");
  const known = new Set([...body.rows].map(shown));
  const here = new URL(location);
  here.searchParams.delete("cursor");
  const answer = await fetch(here, { credentials: "same-origin" });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  body.replaceChildren(...page.querySelectorAll("#requests tbody tr"));
  label(document.querySelector("#requests"));
  const count = [...body.rows].filter((row) => shown(row) && !known.has(shown(row))).length;
  if (count) document.querySelector("#announce").textContent = `${count} new requests`;
}

document.querySelectorAll("table").forEach(label);

const live = document.querySelector("#live");
if (live) {
  let timer = null;
  const step = async () => {
    try {
      await refresh();
    } catch (error) {
      live.checked = false;
      document.querySelector("#announce").textContent = `Live updates stopped: ${error.message}`;
    }
    timer = live.checked ? setTimeout(step, 2000) : null;
  };
  live.addEventListener("change", () => {
    clearTimeout(timer);
    if (live.checked) step();
  });
}
