// opencode: questions by its command, in a folder of its own.
import { mkdirSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { between, command } from "./agent.mjs";
import { SENTENCE, calls, inWords, results } from "./agent_chat.mjs";
import { expect, key, model, probe } from "./probing.mjs";

const program = fileURLToPath(new URL("node_modules/.bin/opencode", import.meta.url));
mkdirSync("work", { recursive: true });
process.chdir("work");
writeFileSync("wood.txt", "ebony\n");

// Its events, and the requests that it sent.
async function asked(hold, message, { words = [], secret = key, mayFail = false } = {}) {
  const server = await between(hold);
  const here = {
    npm: "@ai-sdk/openai-compatible", name: "Here", options: { baseURL: `${server.root}/v1`, apiKey: secret },
    models: { [model]: { name: model, limit: { context: 262_144, output: 512 } } },
  };
  writeFileSync("opencode.json", JSON.stringify({ provider: { here }, autoupdate: false, share: "disabled", permission: "allow" }));
  try {
    const { stdout } = await command(program, ["run", "--format", "json", "--model", `here/${model}`, ...words, message], { mayFail });
    const events = stdout.trim().split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
    return { events, passed: server.passed };
  } finally {
    server.close();
  }
}

function fine({ events, passed }) {
  const said = events.filter(({ type }) => type === "text").map(({ part }) => part.text);
  expect(said.some((text) => text.includes(SENTENCE)), events.slice(-3));
  expect(passed.every(({ status }) => status === 200), passed.map(({ path, status }) => `${path} ${status}`));
}

await probe("a question", async () => {
  const found = await asked(inWords, "Which wood?");
  fine(found);
  return "the answer is shown";
});

await probe("a file read", async () => {
  const found = await asked(calls("read", { filePath: `${process.cwd()}/wood.txt` }), "Which wood is in wood.txt?");
  fine(found);
  const output = found.passed.flatMap((one) => results(one.asked))[0];
  expect(JSON.stringify(output).includes("ebony"), output);
  return "it calls read, and the file's words come back as the result";
});

await probe("the conversation goes on", async () => {
  const found = await asked(inWords, "And now?", { words: ["--continue"] });
  fine(found);
  const { tokens } = found.events.findLast(({ type }) => type === "step_finish").part;
  expect(tokens.cache.read > tokens.input, tokens);
  return "more than half of its prompt is found in the cache";
});

await probe("wrong key", async () => {
  const { events } = await asked(inWords, "Which wood?", { secret: "wrong", mayFail: true });
  const told = JSON.stringify(events.findLast(({ type }) => type === "error"));
  expect(/401|incorrect api key/i.test(told), told);
  return "told as 401";
});
