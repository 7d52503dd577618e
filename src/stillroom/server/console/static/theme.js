// Dark or light, before anything is painted: what was chosen here before, else what the system prefers.
"use strict";
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("stillroom-theme");
  } catch {
    // storage is switched off: the system decides
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
