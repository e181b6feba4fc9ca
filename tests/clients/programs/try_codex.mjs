// Codex: questions by its command, in a folder of its own.
import { mkdirSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { between, command, only } from "./agent.mjs";
import { expect, key, model, probe } from "./probing.mjs";

const program = fileURLToPath(new URL("node_modules/.bin/codex", import.meta.url));
mkdirSync("work", { recursive: true });
process.chdir("work");
writeFileSync("wood.txt", "ebony\n");

const SENTENCE = "The wood is ebony.";
const LENGTH_TOKENS = 262_144;
const outputs = (asked) => asked.input.filter(({ type }) => type === "function_call_output");

function inWords(asked) {
  return { ...asked, text: { format: { type: "json_schema", name: "said", schema: { const: SENTENCE } } } };
}

function looksFirst(asked) {
  if (outputs(asked).length) return inWords(asked);
  const tools = asked.tools.map((tool) => (tool.name === "exec_command" ? { ...tool, parameters: only({ cmd: "cat wood.txt" }) } : tool));
  return { ...asked, tools, tool_choice: { type: "function", name: "exec_command" } };
}

// Its events, and the requests that it sent.
async function asked(hold, message, { words = [], secret = key, mayFail = false } = {}) {
  const server = await between(hold);
  const provider = `{name="here", base_url="${server.root}/v1", env_key="OWN_KEY", wire_api="responses", request_max_retries=0, stream_max_retries=0}`;
  const settings = [
    `model="${model}"`, 'model_provider="here"', `model_providers.here=${provider}`, `model_context_window=${LENGTH_TOKENS}`,
    "check_for_update_on_startup=false", "analytics.enabled=false",
  ];
  const all = ["exec", ...words, "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ...settings.flatMap((one) => ["-c", one]), "-"];
  try {
    const done = await command(program, all, { env: { OWN_KEY: secret }, input: message, mayFail });
    const events = done.stdout.trim().split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
    return { events, passed: server.passed, status: done.status };
  } finally {
    server.close();
  }
}

function fine({ events, passed }) {
  const said = events.filter(({ item }) => item?.type === "agent_message").map(({ item }) => item.text);
  expect(said.some((text) => text.includes(SENTENCE)), events.slice(-3));
  expect(passed.every(({ status }) => status === 200), passed.map(({ path, status }) => `${path} ${status}`));
}

await probe("a question", async () => {
  const found = await asked(inWords, "Which wood?");
  fine(found);
  const { tools, input } = found.passed.at(-1).asked;
  return `${tools.length} tools, ${input.length} items; the answer is shown`;
});

await probe("a command run", async () => {
  const found = await asked(looksFirst, "Which wood is in wood.txt?");
  fine(found);
  const [output] = outputs(found.passed.at(-1).asked);
  expect(JSON.stringify(output).includes("ebony"), output);
  return "it calls exec_command, and what that printed comes back";
});

await probe("the conversation goes on", async () => {
  const found = await asked(inWords, "And now?", { words: ["resume", "--last"] });
  fine(found);
  const { usage } = found.events.findLast(({ type }) => type === "turn.completed");
  expect(usage.cached_input_tokens > usage.input_tokens / 2, usage);
  return "more than half of its prompt is found in the cache";
});

await probe("prompt too long", async () => {
  const { events } = await asked(inWords, "x".repeat(280_000), { mayFail: true });
  const told = JSON.stringify(events.findLast(({ type }) => type === "turn.failed" || type === "error"));
  expect(/context window|too long|context length/i.test(told), told);
  return told.slice(0, 120);
});

await probe("wrong key", async () => {
  const { events, status } = await asked(inWords, "Which wood?", { secret: "wrong", mayFail: true });
  const told = JSON.stringify(events.findLast(({ type }) => type === "turn.failed" || type === "error"));
  expect(status !== 0 && told.includes("401"), status, told);
  return told.slice(0, 120);
});
