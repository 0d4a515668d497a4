// Draws the charts of the page in its colours, and again when these change between light and dark.
"use strict";

{
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function draw(node, { data, layout }) {
    const [ink, dim, line, paper] = ["--ink", "--dim", "--line", "--paper"].map(colour);
    layout.font.color = ink;
    layout.hoverlabel = { bgcolor: paper, bordercolor: dim, align: "left", font: { color: ink } };
    for (const axis of [layout.xaxis, layout.yaxis]) Object.assign(axis, { gridcolor: line, linecolor: dim, tickcolor: dim });
    for (const shape of layout.shapes ?? []) shape.line.color = ink;
    for (const trace of data) {
      for (const bar of [trace.error_x, trace.error_y].filter(Boolean)) {
        for (const end of ["array", "arrayminus"]) bar[end] = bar[end].map((length) => length ?? NaN); // null would be 0
      }
      if (trace.type !== "bar") continue;
      if (trace.error_x) trace.error_x.color = ink;
      trace.marker.line = { color: paper, width: 1 };
    }
    Plotly.react(node, data, layout, { responsive: true, displayModeBar: false });
  }

  const charts = [...document.querySelectorAll(".plot")];
  const figures = charts.map((node) => JSON.parse(node.previousElementSibling.textContent));
  const all = () => charts.forEach((node, i) => draw(node, figures[i]));
  all();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
}
