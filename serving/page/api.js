// The server as this page asks it: addresses are relative, so that any root path works.

export const access = { key: sessionStorage.getItem("key") ?? "" };

export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (access.key) headers.Authorization = `Bearer ${access.key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server cannot be reached");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let said = `the server answered ${response.status}`;
  try {
    said = (await response.json()).error.message ?? said;
  } catch { /* no JSON of ours, from a proxy */ }
  const wait = response.headers.get("Retry-After");
  if (response.status === 401) said += " — enter an API key under Settings";
  if (wait) said += ` — try again in ${wait} s`;
  return Object.assign(new Error(said), { status: response.status });
}

// Yields the JSON of each event of a streamed answer; an error event is thrown.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let isWhole = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // comments keep the connection open
      const data = line.slice(5).trim();
      if (data === "[DONE]") {
        isWhole = true;
        continue;
      }
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
  if (!isWhole) throw new Error("the connection was lost in the middle of the answer");
}
