// What coding agents share: a server between an agent and ours, and their commands.
//
// The model is random, so the server between holds its answers to a form: it adds to a request what the agent itself
// would not ask for. All else passes as it is, and is remembered.
import { spawn } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { fileURLToPath } from "node:url";
import { expect, url } from "./probing.mjs";

const root = url.replace(/\/v1$/, "");
const COMMAND_MS = 300_000;
const KEPT_HEADERS = ["authorization", "x-api-key", "content-type", "anthropic-version", "anthropic-beta"];

export const SENTENCE = "The wood is ebony.";

// An agent's command. From now on this process is in a folder of its own, with a file to read.
export function begin(name) {
  mkdirSync("work", { recursive: true });
  process.chdir("work");
  writeFileSync("wood.txt", "ebony\n");
  return fileURLToPath(new URL(`node_modules/.bin/${name}`, import.meta.url));
}

// What `run` returns, which is told where to send requests, and beside it those that were passed on.
export async function through(hold, run) {
  const server = await between(hold);
  try {
    return { ...(await run(server.root)), passed: server.passed };
  } finally {
    server.close();
  }
}

// hold: what a request becomes. Returns where to send requests, and those that were sent, with their answers' statuses.
async function between(hold) {
  const passed = [];
  const server = createServer(async (request, response) => {
    const parts = [];
    for await (const part of request) parts.push(part);
    const text = Buffer.concat(parts).toString();
    const asked = text ? hold(JSON.parse(text)) : undefined;
    const headers = Object.fromEntries(KEPT_HEADERS.map((name) => [name, request.headers[name]]).filter(([, one]) => one));
    const answer = await fetch(root + request.url, { method: request.method, headers, body: asked && JSON.stringify(asked) });
    if (asked) passed.push({ path: request.url, asked, status: answer.status });
    response.writeHead(answer.status, { "content-type": answer.headers.get("content-type") ?? "application/json" });
    if (answer.body) for await (const part of answer.body) response.write(part);
    response.end();
  });
  await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
  return { root: `http://127.0.0.1:${server.address().port}`, passed, close: () => server.close() };
}

export function allAnswered(passed) {
  expect(passed.every(({ status }) => status === 200), passed.map(({ path, status }) => `${path} ${status}`));
}

// output: of the tool that read the file
export function tellsWood(output) {
  expect(JSON.stringify(output).includes("ebony"), output);
}

// Lines of JSON that a command printed.
export function events(stdout) {
  return stdout.trim().split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
}

// Not spawnSync: the server between runs in this process.
export function command(program, words, { env = {}, input = "", mayFail = false } = {}) {
  return new Promise((done, failed) => {
    const child = spawn(program, words, { env: { ...process.env, ...env }, timeout: COMMAND_MS });
    const said = { stdout: "", stderr: "" };
    for (const stream of ["stdout", "stderr"]) child[stream].on("data", (part) => (said[stream] += part));
    child.on("error", failed);
    child.on("close", (status) => {
      try {
        expect(status === 0 || mayFail, status, (said.stdout + said.stderr).slice(-300));
        done({ status, ...said });
      } catch (error) {
        failed(error);
      }
    });
    child.stdin.end(input);
  });
}

// The schema of a tool whose arguments are these and no others.
export function only(given) {
  const properties = Object.fromEntries(Object.entries(given).map(([name, value]) => [name, { const: value }]));
  return { type: "object", properties, required: Object.keys(given), additionalProperties: false };
}
