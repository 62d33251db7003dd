/* Colours the tokens of an answer by another of their numbers. */
document.addEventListener("change", ({ target: select }) => {
  if (!select.matches(".tokens select.quantity")) return;
  const part = select.closest(".tokens");
  for (const token of part.querySelectorAll(".token")) {
    const shade = token.dataset.shades.split(" ")[select.selectedIndex];
    token.className = token.className.replace(/\bs\d\b/, `s${shade}`);
  }
  for (const scale of part.querySelectorAll(".scale")) scale.hidden = scale.dataset.of !== select.value;
});
