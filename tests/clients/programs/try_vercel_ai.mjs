// Vercel's `ai`, with its provider for servers like OpenAI's.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { expect, key, model as name, onlyC, probe, url } from "./probing.mjs";

const options = { name: "ours", baseURL: url, apiKey: key, includeUsage: true, supportsStructuredOutputs: true };
const provider = createOpenAICompatible(options);
const model = provider(name);
const usual = { model, prompt: "Which wood?", maxRetries: 0, maxOutputTokens: 24 };
const schema = z.object({ wood: z.enum(["oak", "ash"]), boards: z.number().int().min(1).max(9) });
let used = 0;
const price = tool({
  description: "What a board costs.",
  inputSchema: z.object({ wood: z.enum(["oak", "ash"]) }),
  execute: async () => {
    used += 1;
    return "three";
  },
});

await probe("generateText", async () => {
  const answer = await generateText(usual);
  expect(answer.text && answer.usage.outputTokens, answer.usage);
  return `${answer.usage.inputTokens} tokens in, ${answer.usage.outputTokens} out`;
});

await probe("streamText with usage", async () => {
  const stream = streamText({ ...usual, providerOptions: { ours: { logit_bias: onlyC } } });
  const pieces = [];
  for await (const piece of stream.textStream) pieces.push(piece);
  expect(pieces.length > 3 && pieces.join("") === "c".repeat(24), pieces);
  expect((await stream.usage).outputTokens === 24, await stream.usage);
  return "pieces, then usage";
});

await probe("completion", async () => {
  expect((await generateText({ ...usual, model: provider.completionModel(name) })).text);
  return "text";
});

await probe("generateObject", async () => {
  schema.parse((await generateObject({ ...usual, schema, maxOutputTokens: 200 })).object);
  return "fits the zod schema";
});

await probe("streamObject", async () => {
  const stream = streamObject({ ...usual, schema, maxOutputTokens: 200 });
  let pieces = 0;
  for await (const _ of stream.partialObjectStream) pieces += 1;
  schema.parse(await stream.object);
  expect(pieces > 1, pieces);
  return "grows, and fits the zod schema";
});

await probe("tool required, run", async () => {
  const answer = await generateText({ ...usual, tools: { price }, toolChoice: "required", maxOutputTokens: 2000 });
  expect(used >= 1 && answer.toolResults[0].output === "three", used, answer.toolResults);
  return "the tool runs";
});

await probe("tool by name, streamed, then a second step", async () => {
  used = 0;
  const toolChoice = { type: "tool", toolName: "price" };
  const prepareStep = ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : {});
  const stream = streamText({
    ...usual, tools: { price }, toolChoice, prepareStep, stopWhen: stepCountIs(2), maxOutputTokens: 200,
  });
  const kinds = new Set();
  for await (const part of stream.fullStream) kinds.add(part.type);
  expect(used === 1 && kinds.has("tool-input-delta") && kinds.has("text-delta"), used, [...kinds]);
  return "arguments in pieces, the tool runs, text follows";
});

await probe("abort", async () => {
  const control = new AbortController();
  const stream = streamText({ ...usual, maxOutputTokens: 5000, abortSignal: control.signal });
  for await (const part of stream.fullStream) {
    if (part.type === "text-delta") control.abort();
    if (part.type === "abort") return "ends with abort";
  }
  throw new Error("no abort");
});

await probe("prompt too long", async () => {
  const error = await generateText({ ...usual, prompt: "x".repeat(40_000) }).catch((error) => error);
  expect(APICallError.isInstance(error) && error.data.error.code === "context_length_exceeded", error.message);
  return `APICallError, code ${error.data.error.code}`;
});

await probe("wrong key", async () => {
  const stranger = createOpenAICompatible({ ...options, apiKey: "no" })(name);
  const error = await generateText({ ...usual, model: stranger }).catch((error) => error);
  expect(APICallError.isInstance(error) && error.statusCode === 401, error.message);
  return "APICallError, 401";
});
