// opencode: questions by its command, in a folder of its own.
import { writeFileSync } from "node:fs";
import { SENTENCE, allAnswered, begin, command, events, tellsWood, through } from "./agent.mjs";
import { calls, inWords, results } from "./agent_chat.mjs";
import { expect, key, model, probe } from "./probing.mjs";

const program = begin("opencode");

// Its events, and the requests that it sent.
async function asked(hold, message, { words = [], secret = key, mayFail = false } = {}) {
  return through(hold, async (root) => {
    const here = {
      npm: "@ai-sdk/openai-compatible", name: "Here", options: { baseURL: `${root}/v1`, apiKey: secret },
      models: { [model]: { name: model, limit: { context: 262_144, output: 512 } } },
    };
    writeFileSync("opencode.json", JSON.stringify({ provider: { here }, autoupdate: false, share: "disabled", permission: "allow" }));
    const all = ["run", "--format", "json", "--model", `here/${model}`, ...words, message];
    return { told: events((await command(program, all, { mayFail })).stdout) };
  });
}

function fine({ told, passed }) {
  const said = told.filter(({ type }) => type === "text").map(({ part }) => part.text);
  expect(said.some((text) => text.includes(SENTENCE)), told.slice(-3));
  allAnswered(passed);
}

await probe("a question", async () => {
  const found = await asked(inWords, "Which wood?");
  fine(found);
  return "the answer is shown";
});

await probe("a file read", async () => {
  const found = await asked(calls("read", { filePath: `${process.cwd()}/wood.txt` }), "Which wood is in wood.txt?");
  fine(found);
  tellsWood(found.passed.flatMap((one) => results(one.asked))[0]);
  return "it calls read, and the file's words come back as the result";
});

await probe("the conversation goes on", async () => {
  const found = await asked(inWords, "And now?", { words: ["--continue"] });
  fine(found);
  const { tokens } = found.told.findLast(({ type }) => type === "step_finish").part;
  expect(tokens.cache.read > tokens.input, tokens);
  return "more than half of its prompt is found in the cache";
});

await probe("wrong key", async () => {
  const { told } = await asked(inWords, "Which wood?", { secret: "wrong", mayFail: true });
  const error = JSON.stringify(told.findLast(({ type }) => type === "error"));
  expect(/401|incorrect api key/i.test(error), error);
  return "told as 401";
});
