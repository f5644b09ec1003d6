for (const root of document.querySelectorAll(".what-if:not([data-live])")) {
  root.dataset.live = "";
  const positions = JSON.parse(root.dataset.positions);
  const [controls, slider, table] = ["div", "input", "details"].map((tag) => root.querySelector(tag));
  const show = () => {
    const { size, words, at, texts } = positions[slider.value];
    root.querySelector(".size").textContent = size;
    slider.setAttribute("aria-valuetext", words);
    root.querySelectorAll(".quantity").forEach((card, i) => {
      const [value, interval, basis] = texts[i];
      card.querySelector("strong").textContent = value;
      card.querySelector("strong + span").textContent = interval && `(${interval})`;
      card.lastElementChild.textContent = basis || "measured";
      const [x, y] = at[i];
      card.querySelector(".at").setAttribute("transform", `translate(${x})`);
      card.querySelector(".at circle").setAttribute("cy", y ?? -9);
    });
  };
  const onPaper = (paper) => {
    controls.hidden = paper;
    table.open = paper;
  };
  slider.addEventListener("input", show);
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));
  show();
  onPaper(false);
}
