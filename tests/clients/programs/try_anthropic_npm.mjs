// Anthropic's own package for Node.
import Anthropic from "@anthropic-ai/sdk";
import { expect, key, model, probe, raises, url } from "./probing.mjs";

const baseURL = url.replace(/\/v1$/, "");
const client = new Anthropic({ baseURL, apiKey: key, maxRetries: 0 });
const asked = { model, system: "You inlay.", messages: [{ role: "user", content: "Which wood?" }], max_tokens: 24 };
const input_schema = { type: "object", properties: { wood: { enum: ["oak", "ash"] } }, required: ["wood"] };
const tools = [{ name: "order", input_schema }];

await probe("message", async () => {
  const answer = await client.messages.create(asked);
  expect(answer.content[0].text && answer.usage.output_tokens && answer._request_id, answer);
  return `${answer.usage.input_tokens + answer.usage.cache_read_input_tokens} tokens in, ${answer.usage.output_tokens} out`;
});

await probe("stream", async () => {
  const whole = await client.messages.create({ ...asked, temperature: 0 });
  const stream = client.messages.stream({ ...asked, temperature: 0 });
  let text = "";
  stream.on("text", (piece) => (text += piece));
  const final = await stream.finalMessage();
  expect(text === whole.content[0].text && final.content[0].text === text, text, whole);
  return "the same text, then the whole message";
});

await probe("stream that is left", async () => {
  const stream = await client.messages.create({ ...asked, stream: true, max_tokens: 5000 });
  for await (const _ of stream) break;
  expect(stream.controller.signal.aborted);
  return "ends quietly";
});

await probe("tool by name, streamed", async () => {
  const tool_choice = { type: "tool", name: "order" };
  const stream = client.messages.stream({ ...asked, tools, tool_choice, max_tokens: 300 });
  let pieces = 0;
  stream.on("inputJson", () => (pieces += 1));
  const { content: [call], stop_reason } = await stream.finalMessage();
  expect(pieces > 3 && ["oak", "ash"].includes(call.input.wood) && stop_reason === "tool_use", pieces, call);
  return "input in pieces";
});

await probe("tool, its result, thinking", async () => {
  const call = { type: "tool_use", id: "toolu_1", name: "order", input: { wood: "oak" } };
  const thought = { type: "thinking", thinking: "Oak is hard.", signature: "c2ln" };
  const messages = [
    ...asked.messages,
    { role: "assistant", content: [thought, call] },
    { role: "user", content: [{ type: "tool_result", tool_use_id: "toolu_1", content: "2 boards" }] },
  ];
  const answer = await client.messages.create({ ...asked, messages, tools, thinking: { type: "disabled" } });
  expect(answer.content.length, answer);
  return "goes on in words";
});

await probe("count_tokens", async () => {
  const { max_tokens, ...counted } = asked;
  const { input_tokens } = await client.messages.countTokens(counted);
  const { usage } = await client.messages.create(asked);
  expect(input_tokens === usage.input_tokens + usage.cache_read_input_tokens, input_tokens, usage);
  return `${input_tokens} tokens, as the message has`;
});

await probe("wrong value", () => raises(Anthropic.BadRequestError, () => client.messages.create({ ...asked, top_p: 7 })));

await probe("wrong key", () =>
  raises(Anthropic.AuthenticationError, () => new Anthropic({ baseURL, apiKey: "wrong", maxRetries: 0 }).models.list()),
);
