// The engine as /metrics tells of it, once a second.

import { ask } from "./api.js";

const SECOND = 1000;
const SHOWN = 120; // points of the curve
const WINDOW = 30; // seconds that a mean is of
const at = (id) => document.getElementById(id);
const samples = []; // newest last
const rates = [];

// Returns the sum of each series by name, and of blocks each state.
export function parse(text) {
  const sums = {};
  for (const line of text.split("\n")) {
    const match = /^([a-z_:]+)(?:\{(.*)\})? ([^ ]+)$/i.exec(line);
    if (!match) continue;
    const state = /(?:^|,)state="(\w+)"/.exec(match[2] ?? "");
    const name = match[1].replace("lamina:", "") + (state ? `.${state[1]}` : "");
    sums[name] = (sums[name] ?? 0) + Number(match[3]);
  }
  return sums;
}

function mean(name, now, then) {
  const count = now[`${name}_count`] - then[`${name}_count`];
  return count > 0 ? (now[`${name}_sum`] - then[`${name}_sum`]) / count : undefined;
}

function seconds(value) {
  if (value === undefined) return "–";
  return value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(1)} s`;
}

function percent(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(0)} %` : "–";
}

function show(now) {
  const before = samples.at(-1) ?? now;
  samples.push(now);
  while (now.at - samples[0].at > WINDOW) samples.shift();
  const then = samples[0];
  const spent = now.at - before.at;
  const rate = spent > 0 ? Math.max(now.generation_tokens_total - before.generation_tokens_total, 0) / spent : 0;
  const count = (name) => now[name] ?? "–";
  at("running").textContent = count("num_requests_running");
  at("waiting").textContent = count("num_requests_waiting");
  at("rate").textContent = rate.toFixed(rate < 10 ? 1 : 0);
  at("first-token").textContent = seconds(mean("time_to_first_token_seconds", now, then));
  at("between-tokens").textContent = seconds(mean("inter_token_latency_seconds", now, then));
  at("hits").textContent = percent(now.prefix_cache_hits_total, now.prefix_cache_queries_total);
  at("blocks").value = now["kv_cache_blocks.total"] > 0 ? now["kv_cache_blocks.used"] / now["kv_cache_blocks.total"] : 0;
  at("blocks-text").textContent = `${count("kv_cache_blocks.used")} of ${count("kv_cache_blocks.total")} used, ${count("kv_cache_blocks.cached")} cached`;
  draw(rate);
}

function draw(rate) {
  rates.push(rate);
  if (rates.length > SHOWN) rates.shift();
  const top = Math.max(...rates, 1);
  const points = rates.map((value, index) => `${SHOWN - rates.length + index + 1},${30 - (28 * value) / top}`);
  at("history").firstElementChild.setAttribute("points", points.join(" "));
}

// Returns whether that is news, and says it only then: a screen reader need not hear it every second.
function tell(state, text) {
  if (at("state").textContent === text) return false;
  at("state").dataset.state = state;
  at("state").textContent = text;
  at("state").title = text;
  return true;
}

// Returns why the engine is not ready, as the refusal says it.
async function reason() {
  return ask("health/ready").then(() => "the engine is not ready", (error) => error.message);
}

async function look(onReady) {
  try {
    const text = await (await ask("metrics")).text();
    const now = { ...parse(text), at: performance.now() / SECOND };
    show(now);
    if (!(now.engine_up >= 1)) tell("down", await reason());
    else if (tell("up", "ready")) onReady();
  } catch (error) {
    tell("down", error.message);
  }
}

// onReady is called each time that the engine has become ready.
export function start(onReady) {
  const again = async () => {
    if (!document.hidden) await look(onReady);
    setTimeout(again, SECOND);
  };
  again();
}
