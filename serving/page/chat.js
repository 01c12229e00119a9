// The conversation: messages out, answers streamed in.

import { ask, events } from "./api.js";
import { note } from "./requests.js";

const at = (id) => document.getElementById(id);
const log = at("log");
const messages = [];
let running = null; // the AbortController of the answer that is being written

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];

function body(settings) {
  const asked = {
    model: at("model").value || undefined,
    messages: settings.system ? [{ role: "system", content: settings.system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true, include_timing: true },
  };
  for (const name of NUMBERS) if (settings[name] !== "") asked[name] = Number(settings[name]);
  if (settings.stop) asked.stop = [settings.stop];
  return JSON.stringify(asked);
}

function show(role, text) {
  at("empty")?.remove();
  const article = document.createElement("article");
  article.dataset.role = role;
  const [title, paragraph, foot] = ["h3", "p", "footer"].map((tag) => article.appendChild(document.createElement(tag)));
  title.textContent = role === "user" ? "You" : "Model";
  const node = paragraph.appendChild(document.createTextNode(text));
  log.append(article);
  log.scrollTop = log.scrollHeight;
  return { article, node, foot };
}

function append(answer, text) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  answer.node.appendData(text);
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function complain(text) {
  at("problem").textContent = text;
  at("problem").hidden = !text;
}

function setRunning(controller) {
  running = controller;
  if ([at("send"), at("stop")].includes(document.activeElement)) at("message").focus(); // one of them goes
  at("send").hidden = Boolean(controller);
  at("stop").hidden = !controller;
}

// Reads one answer into the page; returns what the request came to, for the table of requests.
async function read(response, answer, asked) {
  const came = { asked, end: "?" };
  for await (const event of events(response)) {
    const choice = event.choices[0];
    if (choice?.delta?.reasoning_content) answer.foot.textContent = "reasoning…";
    if (choice?.delta?.content) {
      came.first ??= performance.now();
      append(answer, choice.delta.content);
    }
    if (choice?.finish_reason) came.end = choice.finish_reason;
    if (event.usage) came.usage = event.usage;
    if (event.timing) came.timing = event.timing;
  }
  return came;
}

async function answerTo(settings) {
  const controller = new AbortController();
  setRunning(controller);
  const asked = performance.now();
  const answer = show("assistant", "");
  answer.article.setAttribute("aria-busy", "true");
  try {
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: body(settings), signal: controller.signal };
    const came = await read(await ask("v1/chat/completions", options), answer, asked);
    answer.foot.textContent = came.end === "length" ? "cut off at the limit of tokens" : "";
    note(came);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    answer.foot.textContent = isStopped ? "stopped" : "not finished";
    note({ asked, end: isStopped ? "stopped" : "error" });
    if (!isStopped) complain(error.message);
  } finally {
    answer.article.removeAttribute("aria-busy");
    setRunning(null);
  }
  keep(answer);
}

// What was written stays part of the conversation; an answer that never began takes its question back.
function keep(answer) {
  if (answer.node.data) {
    messages.push({ role: "assistant", content: answer.node.data });
    return;
  }
  if (answer.foot.textContent) {
    at("message").value ||= messages.pop().content;
    answer.article.previousElementSibling.remove();
    answer.article.remove();
  } else {
    answer.foot.textContent = "an empty answer";
    messages.push({ role: "assistant", content: "" });
  }
}

export function start(settingsOf) {
  const field = at("message");
  at("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = field.value.trim();
    if (running || !text || !at("settings").reportValidity()) return;
    complain("");
    field.value = "";
    messages.push({ role: "user", content: text });
    show("user", text);
    answerTo(settingsOf());
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    at("composer").requestSubmit();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  at("stop").addEventListener("click", () => running?.abort());
  at("clear").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    log.replaceChildren();
    complain("");
    field.focus();
  });
}
