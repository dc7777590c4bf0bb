"use strict";
// Live updates of the list of requests, and the columns' names for narrow windows.
const figures = new Intl.NumberFormat("en-US");
const figure = (value) => (value === null ? "–" : figures.format(value));

function label(table) {
  const names = [...table.tHead.rows[0].cells].map((head) => head.textContent);
  for (const row of table.tBodies[0].rows) {
    if (row.cells.length === names.length) names.forEach((name, place) => (row.cells[place].dataset.label = name));
  }
  table.classList.add("labeled");
}

function cell(row, text, kind) {
  const made = row.insertCell();
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function rowOf(one) {
  const row = document.createElement("tr");
  const link = document.createElement("a");
  link.href = `/compaction/view/${one.id}`;
  link.textContent = one.time.slice(0, 19).replace("T", " ");
  row.insertCell().append(link);
  for (const name of ["team", "key", "policy", "model"]) cell(row, one[name] ?? "–");
  const verdict = document.createElement("span");
  verdict.className = `v v-${one.verdict}`;
  verdict.textContent = one.verdict;
  row.insertCell().append(verdict);
  cell(row, figure(one.tokens.before), "n");
  const would = one.tokens.forecast === null ? "" : `, would be ${figure(one.tokens.forecast)}`;
  cell(row, figure(one.tokens.sent) + would, "n");
  cell(row, String(one.status), "n");
  cell(row, one.ms.total === null ? "–" : figures.format(Math.round(one.ms.total)), "n");
  return row;
}

async function refresh(newest) {
  const asked = new URLSearchParams(location.search);
  asked.delete("cursor");
  asked.set("limit", "50");
  const answer = await fetch(`/compaction/requests?${asked}`, { credentials: "same-origin" });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const records = (await answer.json()).data;
  document.querySelector("#requests tbody").replaceChildren(...records.map(rowOf));
  label(document.querySelector("#requests"));
  const added = records.findIndex((one) => one.id === newest);
  const count = added < 0 ? records.length : added;
  if (newest !== null && count) document.querySelector("#announce").textContent = `${count} new requests`;
  return records.length ? records[0].id : newest;
}

document.querySelectorAll("table").forEach(label);

const live = document.querySelector("#live");
if (live) {
  let timer = null;
  let newest = null;
  const step = async () => {
    try {
      newest = await refresh(newest);
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
