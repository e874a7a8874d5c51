// The server's API as the page uses it: requests with the key, streams as chunks, errors as sentences that say what to do.

export class ApiError extends Error {
  /**
   * status: of an answer; 0 where there was none. isLost: the server could not be reached, or no longer.
   * isUnsendable: a wrong key, as it can be in no request.
   */
  constructor(sentence, { status = 0, isLost = false, isUnsendable = false } = {}) {
    super(sentence);
    Object.assign(this, { status, isLost, isUnsendable });
  }
}

const UNREACHABLE =
  "The server cannot be reached. If it is starting again, wait until this page says so no more, then send once more.";
const UNSENDABLE = "This key holds a character that no key has, perhaps a typographic quote: copy it once more.";
const BREATH = 12; // milliseconds of reading without a pause, in which the page draws and hears of Stop
const BROKEN_OFF = "The connection broke off, so this answer is not whole. Regenerate it when the server is back.";

export class Api {
  #key = () => "";

  constructor(key) {
    this.#key = key;
  }

  async get(path, signal) {
    return this.#request(path, { signal });
  }

  async json(path) {
    return (await this.get(path)).json();
  }

  async post(path, body, signal) {
    return this.#request(path, {
      method: "POST",
      body: JSON.stringify(body),
      headers: { "Content-Type": "application/json" },
      signal,
    });
  }

  /** The chunks of a streamed chat, as they arrive. Throws ApiError; an abort throws the signal's AbortError. */
  async *chat(body, signal) {
    const options = { include_usage: true, continuous_usage_stats: true };
    const response = await this.post(
      "v1/chat/completions",
      { ...body, stream: true, return_groups: true, stream_options: options },
      signal,
    );
    let ended = false;
    for await (const data of events(response.body, signal)) {
      if (data === "[DONE]") {
        ended = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(`The server ended this answer: ${chunk.error.message}`);
      yield chunk;
    }
    if (!ended) throw new ApiError(BROKEN_OFF, { isLost: true });
  }

  async #request(path, init) {
    const headers = new Headers(init.headers);
    try {
      if (this.#key()) headers.set("Authorization", `Bearer ${this.#key()}`);
    } catch {
      throw new ApiError(UNSENDABLE, { status: 401, isUnsendable: true });
    }
    let response;
    try {
      response = await fetch(path, { ...init, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(UNREACHABLE, { isLost: true });
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

/** A turn of the event loop. Timers would do too, but come once a second in a hidden tab. */
const pause = () =>
  new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });

async function* events(body, signal) {
  let paused = performance.now();
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (performance.now() - paused > BREATH) {
          await pause();
          signal?.throwIfAborted(); // else what has arrived already would still be shown
          paused = performance.now();
        }
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(BROKEN_OFF, { isLost: true });
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  const { message = response.statusText, code = null } = body.error ?? {};
  const seconds = response.headers.get("Retry-After");
  const later = seconds ? `Try again in ${seconds} s.` : "Try again in a while.";
  return new ApiError(sentence(response.status, code, message, later), { status: response.status });
}

function sentence(status, code, message, later) {
  if (status === 401) return "This server wants an API key: give it with the button “API key”, then send again.";
  if (code === "context_length_exceeded")
    return `${message} Begin a new conversation, shorten this one, or ask for fewer tokens.`;
  if (status === 404) return `${message} Choose one of the listed models.`;
  if (status === 413) return "That is more than the server takes at once: shorten the message or begin a new conversation.";
  if (status === 429) return `The server is busy: ${message} ${later}`;
  if (status === 503) return `The server cannot answer now: ${message} ${later}`;
  if (status >= 500) return `The server failed on this request. ${later} Its log says why.`;
  return `The server refused this: ${message} Change it and send again.`;
}
