// What the page does when it opens: models, settings, theme; then the chat and the engine's view.

import { access, ask } from "./api.js";
import { start as startChat } from "./chat.js";
import { start as startEngine } from "./engine.js";

const THEMES = { "": "as the system has it", light: "light", dark: "dark" };
const at = (id) => document.getElementById(id);
const settings = at("settings");

async function listModels() {
  const models = at("model");
  try {
    const { data } = await (await ask("v1/models")).json();
    models.replaceChildren(...data.map((model) => new Option(model.id)));
    models.disabled = data.length < 2;
  } catch {
    models.replaceChildren(); // the state beside it says why
  }
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  at("theme").setAttribute("aria-label", `Theme: ${THEMES[theme]}`);
  at("theme").title = `Theme: ${THEMES[theme]}`;
  localStorage.setItem("theme", theme);
}

at("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(localStorage.getItem("theme") ?? "") + 1) % names.length]);
});

settings.addEventListener("submit", (event) => event.preventDefault());
settings.elements.key.value = access.key;
settings.elements.key.addEventListener("change", () => {
  access.key = settings.elements.key.value.trim();
  sessionStorage.setItem("key", access.key); // until the tab is closed
  listModels();
});

setTheme(localStorage.getItem("theme") ?? "");
startChat(() => Object.fromEntries(new FormData(settings)));
startEngine(listModels);
