// Sets the dark or light theme before the first paint: the stored choice, else the system's.
"use strict";
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("stillroom-theme");
  } catch {
    // storage is disabled: the system's theme is used
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
