// Qwen Code: questions by its command, in a folder of its own.
import { SENTENCE, allAnswered, begin, command, tellsWood, through } from "./agent.mjs";
import { calls, inWords, results } from "./agent_chat.mjs";
import { expect, key, model, probe } from "./probing.mjs";

const program = begin("qwen");

// Its messages, and the requests that it sent.
async function asked(hold, message, { words = [], secret = key, mayFail = false } = {}) {
  const all = ["--auth-type", "openai", "--yolo", "--output-format", "json", ...words, "-p", message];
  return through(hold, async (root) => {
    const env = { OPENAI_API_KEY: secret, OPENAI_BASE_URL: `${root}/v1`, OPENAI_MODEL: model };
    const { stdout, stderr } = await command(program, all, { env, mayFail });
    return { said: stdout + stderr };
  });
}

function fine({ said, passed }) {
  expect(said.includes(SENTENCE), said.slice(-300));
  allAnswered(passed);
}

await probe("a question", async () => {
  const found = await asked(inWords, "Which wood?");
  fine(found);
  return "the answer is shown";
});

await probe("a file read", async () => {
  const found = await asked(calls("read_file", { file_path: `${process.cwd()}/wood.txt` }), "Which wood is in wood.txt?");
  fine(found);
  tellsWood(found.passed.flatMap((one) => results(one.asked))[0]);
  return "it calls read_file, and the file's words come back as the result";
});

await probe("the conversation goes on", async () => {
  const found = await asked(inWords, "And now?", { words: ["--continue"] });
  fine(found);
  const roles = found.passed.at(-1).asked.messages.map(({ role }) => role);
  expect(roles.filter((role) => role === "assistant").length > 1, roles);
  return "with what was said before";
});

await probe("wrong key", async () => {
  const { said } = await asked(inWords, "Which wood?", { secret: "wrong", mayFail: true });
  expect(/401|incorrect api key/i.test(said), said.slice(-300));
  return "told as 401";
});
