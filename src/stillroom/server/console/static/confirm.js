// The dialog that confirms a deletion.

import { byId } from "./dom.js";

/** Ask for confirmation; `remove` runs only if it is given. Enter keeps. */
export function askToDelete(title, text, remove) {
  const dialog = byId("delete-dialog");
  byId("delete-title").textContent = title;
  byId("delete-text").textContent = text;
  byId("delete-form").onsubmit = (event) => {
    event.preventDefault();
    dialog.close();
    if (event.submitter?.value === "delete") remove();
  };
  dialog.showModal();
}
