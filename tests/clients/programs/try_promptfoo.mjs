// promptfoo: prompts with what is expected of them, by its command.
import { spawnSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { expect, key, model, probe, url } from "./probing.mjs";

const program = fileURLToPath(new URL("node_modules/.bin/promptfoo", import.meta.url));
const schema = { type: "object", properties: { wood: { enum: ["oak", "ash"] } }, required: ["wood"], additionalProperties: false };
const response_format = { type: "json_schema", json_schema: { name: "order", schema, strict: true } };

async function evaluated(kind, more, assertions) {
  const config = { apiBaseUrl: url, apiKey: key, max_tokens: 64, ...more };
  const suite = {
    prompts: ["Which {{what}}?", "Say a {{what}}."],
    providers: [{ id: `openai:${kind}:${model}`, config }],
    tests: ["wood", "glue"].map((what) => ({ vars: { what }, assert: assertions })),
  };
  writeFileSync("suite.json", JSON.stringify(suite));
  const env = {
    ...process.env, PROMPTFOO_CONFIG_DIR: `${process.cwd()}/own`, PROMPTFOO_DISABLE_TELEMETRY: "1",
    PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_DISABLE_SHARING: "1",
  };
  const words = ["eval", "-c", "suite.json", "-o", "found.json", "--no-cache", "--no-progress-bar"];
  const done = spawnSync(program, words, { env, encoding: "utf8", timeout: 300_000 });
  expect(done.status === 0, done.status, (done.stdout + done.stderr).slice(-300));
  const { stats } = JSON.parse(readFileSync("found.json", "utf8")).results;
  expect(stats.successes === 4 && !stats.failures && !stats.errors, stats);
  return "4 of 4 pass";
}

const said = [{ type: "javascript", value: "output.length > 0" }];
await probe("chat", () => evaluated("chat", {}, said));
await probe("completion", () => evaluated("completion", {}, said));
await probe("responses", () => evaluated("responses", { max_output_tokens: 64 }, said));
await probe("chat, held to a schema", () =>
  evaluated("chat", { response_format }, [{ type: "javascript", value: "['oak', 'ash'].includes(output.wood)" }]),
);
