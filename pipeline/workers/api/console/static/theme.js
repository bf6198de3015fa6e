// Before the first paint: the theme that the user chose, if any.
(() => {
  const chosen = localStorage.getItem("logweir-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  document.documentElement.classList.add("has-js");
})();
