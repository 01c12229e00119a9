// What each request of this page took, phase by phase.

const LONGEST = 50;

// came: when it was asked, what usage and timing the server told, and how it ended.
export function note(came) {
  const rows = document.getElementById("requests");
  rows.querySelector(".empty")?.parentElement.remove();
  const timing = came.timing ?? { total: performance.now() - came.asked };
  const mark = came.timing ? "" : "~";
  const cells = [
    came.usage?.completion_tokens ?? "",
    ...["queue", "prefill", "decode", "total"].map((phase) => shown(timing[phase], mark)),
    came.end,
  ];
  const row = document.createElement("tr");
  for (const cell of cells) row.appendChild(document.createElement("td")).textContent = cell;
  rows.prepend(row);
  while (rows.children.length > LONGEST) rows.lastElementChild.remove();
}

function shown(milliseconds, mark) {
  if (milliseconds === undefined) return "";
  return mark + milliseconds.toFixed(milliseconds < 10 ? 1 : 0);
}
