// Codex: questions by its command, in a folder of its own.
import { SENTENCE, allAnswered, begin, command, events, only, tellsWood, through } from "./agent.mjs";
import { expect, key, model, probe } from "./probing.mjs";

const program = begin("codex");

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
  return through(hold, async (root) => {
    const provider = `{name="here", base_url="${root}/v1", env_key="OWN_KEY", wire_api="responses", request_max_retries=0, stream_max_retries=0}`;
    const settings = [
      `model="${model}"`, 'model_provider="here"', `model_providers.here=${provider}`, `model_context_window=${LENGTH_TOKENS}`,
      "check_for_update_on_startup=false", "analytics.enabled=false",
    ];
    const all = ["exec", ...words, "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ...settings.flatMap((one) => ["-c", one]), "-"];
    const { stdout, status } = await command(program, all, { env: { OWN_KEY: secret }, input: message, mayFail });
    return { told: events(stdout), status };
  });
}

function fine({ told, passed }) {
  const said = told.filter(({ item }) => item?.type === "agent_message").map(({ item }) => item.text);
  expect(said.some((text) => text.includes(SENTENCE)), told.slice(-3));
  allAnswered(passed);
}

const failure = (told) => JSON.stringify(told.findLast(({ type }) => type === "turn.failed" || type === "error"));

await probe("a question", async () => {
  const found = await asked(inWords, "Which wood?");
  fine(found);
  const { tools, input } = found.passed.at(-1).asked;
  return `${tools.length} tools, ${input.length} items; the answer is shown`;
});

await probe("a command run", async () => {
  const found = await asked(looksFirst, "Which wood is in wood.txt?");
  fine(found);
  tellsWood(outputs(found.passed.at(-1).asked)[0]);
  return "it calls exec_command, and what that printed comes back";
});

await probe("the conversation goes on", async () => {
  const found = await asked(inWords, "And now?", { words: ["resume", "--last"] });
  fine(found);
  const { usage } = found.told.findLast(({ type }) => type === "turn.completed");
  expect(usage.cached_input_tokens > usage.input_tokens / 2, usage);
  return "more than half of its prompt is found in the cache";
});

await probe("prompt too long", async () => {
  const { told } = await asked(inWords, "x".repeat(280_000), { mayFail: true });
  const error = failure(told);
  expect(/context window|too long|context length/i.test(error), error);
  return error.slice(0, 120);
});

await probe("wrong key", async () => {
  const { told, status } = await asked(inWords, "Which wood?", { secret: "wrong", mayFail: true });
  const error = failure(told);
  expect(status !== 0 && error.includes("401"), status, error);
  return error.slice(0, 120);
});
