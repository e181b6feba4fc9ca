// OpenAI's own package for Node.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { expect, key, model, onlyC, probe, raises, url } from "./probing.mjs";

const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "Which wood?" }];
const Order = z.object({ wood: z.enum(["oak", "ash"]), boards: z.number().int().min(1).max(9) });
const parameters = { type: "object", properties: { wood: { enum: ["oak", "ash"] } }, required: ["wood"] };
const tools = [{ type: "function", function: { name: "order", parameters } }];
const ask = (fields) => client.chat.completions.create({ model, messages, max_tokens: 24, ...fields });

await probe("models", async () => {
  const names = [];
  for await (const one of client.models.list()) names.push(one.id);
  return names.join(", ");
});

await probe("chat", async () => {
  const answer = await ask({});
  expect(answer.choices[0].message.content && answer.usage.completion_tokens, answer);
  return `${answer.usage.prompt_tokens} tokens in, ${answer.usage.completion_tokens} out`;
});

await probe("stream with usage", async () => {
  let last, text = "", count = 0;
  for await (const chunk of await ask({ stream: true, stream_options: { include_usage: true }, logit_bias: onlyC })) {
    last = chunk;
    text += chunk.choices[0]?.delta.content ?? "";
    count += 1;
  }
  expect(count > 5 && text === "c".repeat(24) && last.usage.completion_tokens === 24, count, text, last);
  return "pieces, then usage";
});

await probe("stream that is left", async () => {
  const stream = await ask({ stream: true, max_tokens: 5000 });
  for await (const _ of stream) break;
  expect(stream.controller.signal.aborted);
  return "ends quietly";
});

await probe("log-probabilities", async () => {
  const answer = await ask({ logprobs: true, top_logprobs: 2, max_tokens: 4 });
  expect(answer.choices[0].logprobs.content.every((one) => one.top_logprobs.length === 2), answer);
  return "2 for each token";
});

await probe("tool required", async () => {
  const answer = await ask({ tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 });
  const [call] = answer.choices[0].message.tool_calls;
  expect(["oak", "ash"].includes(JSON.parse(call.function.arguments).wood), call);
  return "calls order";
});

await probe("tool by name, streamed", async () => {
  const tool_choice = { type: "function", function: { name: "order" } };
  const stream = client.chat.completions.stream({ model, messages, tools, tool_choice, max_tokens: 200 });
  let pieces = 0;
  stream.on("tool_calls.function.arguments.delta", () => (pieces += 1));
  const [call] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
  expect(pieces > 3 && JSON.parse(call.function.arguments).wood, pieces, call);
  return "arguments in pieces";
});

await probe("runTools", async () => {
  let used = 0;
  const run = (given) => {
    used += 1;
    return given.wood;
  };
  const order = { type: "function", function: { name: "order", parameters, parse: JSON.parse, function: run } };
  const tool_choice = { type: "function", function: { name: "order" } };
  const runner = client.chat.completions.runTools({ model, messages, tools: [order], tool_choice, max_tokens: 200 });
  await runner.done();
  expect(used === 1, used);
  return "the function runs";
});

await probe("structured output, parsed", async () => {
  const answer = await client.chat.completions.parse({
    model, messages, max_tokens: 200, response_format: zodResponseFormat(Order, "order"),
  });
  Order.parse(answer.choices[0].message.parsed);
  return "fits the zod schema";
});

await probe("responses, streamed", async () => {
  const kinds = new Set();
  for await (const event of await client.responses.create({
    model, input: "Which wood?", max_output_tokens: 16, stream: true,
  })) kinds.add(event.type);
  expect(kinds.has("response.output_text.delta"), [...kinds]);
  return `${kinds.size} kinds of event`;
});

await probe("prompt too long", async () => {
  const long = [{ role: "user", content: "x".repeat(40_000) }];
  const error = await ask({ messages: long }).catch((error) => error);
  expect(error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded", error.message);
  return `BadRequestError, code ${error.code}`;
});

await probe("wrong key", () =>
  raises(OpenAI.AuthenticationError, () => new OpenAI({ baseURL: url, apiKey: "wrong", maxRetries: 0 }).models.list()),
);
