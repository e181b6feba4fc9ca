// Claude Code: questions by its command, in a folder of its own.
import { SENTENCE, allAnswered, begin, command, only, tellsWood, through } from "./agent.mjs";
import { expect, key, model, probe } from "./probing.mjs";

const program = begin("claude");

const results = (asked) =>
  asked.messages.flatMap(({ content }) => (Array.isArray(content) ? content.filter(({ type }) => type === "tool_result") : []));

function inWords(asked) {
  return { ...asked, output_config: { ...asked.output_config, format: { type: "json_schema", schema: { const: SENTENCE } } } };
}

// The first answer calls a tool with this input, the next one is in words.
function calls(name, input) {
  return (asked) => {
    if (results(asked).length) return inWords(asked);
    const tools = asked.tools.map((tool) => (tool.name === name ? { ...tool, input_schema: only(input) } : tool));
    return { ...asked, tools, tool_choice: { type: "tool", name } };
  };
}

// What it says in the end, and the requests that it sent. words: more for its command.
async function asked(hold, message, { words = [], secret = key, mayFail = false } = {}) {
  const names = ["MODEL", "SMALL_FAST_MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL"];
  return through(hold, async (root) => {
    const env = {
      ...Object.fromEntries(names.map((name) => [`ANTHROPIC_${name}`, model])),
      ANTHROPIC_BASE_URL: root, ANTHROPIC_AUTH_TOKEN: secret,
      CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", DISABLE_AUTOUPDATER: "1", CLAUDE_CODE_MAX_RETRIES: "1",
    };
    const { stdout } = await command(program, ["-p", "--output-format", "json", ...words], { env, input: message, mayFail });
    return { told: JSON.parse(stdout.trim().split("\n").at(-1)) };
  });
}

const fine = ({ told, passed }) => {
  expect(!told.is_error && told.result.includes(SENTENCE), told);
  allAnswered(passed);
};

await probe("a question", async () => {
  const found = await asked(inWords, "Which wood?");
  fine(found);
  const { tools, messages } = found.passed.at(-1).asked;
  return `${tools.length} tools, ${messages.length} messages; the answer is shown`;
});

await probe("a file read", async () => {
  const found = await asked(calls("Read", { file_path: `${process.cwd()}/wood.txt` }), "Which wood is in wood.txt?");
  fine(found);
  tellsWood(results(found.passed.at(-1).asked)[0]);
  return "it calls Read, and the file's words come back as the result";
});

await probe("a tool found by a search", async () => {
  const found = await asked(calls("ToolSearch", { query: "select:WebFetch", max_results: 1 }), "Fetch it.");
  fine(found);
  const last = found.passed.at(-1).asked;
  const [reference] = results(last).flatMap(({ content }) => content);
  expect(reference.type === "tool_reference" && reference.tool_name === "WebFetch", reference);
  expect(last.tools.find(({ name }) => name === "WebFetch").defer_loading, last.tools.map(({ name }) => name));
  return "its definition is read where the search found it";
});

await probe("the conversation goes on", async () => {
  const found = await asked(inWords, "And now?", { words: ["--continue"] });
  fine(found);
  const { cache_read_input_tokens: read, input_tokens: rest } = found.told.usage;
  expect(read > rest, found.told.usage);
  return "more than half of its prompt is found in the cache";
});

await probe("prompt too long", async () => {
  const { told, passed } = await asked(inWords, "x".repeat(280_000), { mayFail: true });
  expect(told.is_error && /prompt is too long/i.test(told.result), told);
  expect(passed.some(({ status }) => status === 400), passed.map(({ status }) => status));
  return told.result.slice(0, 80);
});

await probe("wrong key", async () => {
  const { told } = await asked(inWords, "Which wood?", { secret: "wrong", mayFail: true });
  expect(told.is_error && /401|authenticat|api key/i.test(told.result), told);
  return told.result.slice(0, 80);
});
