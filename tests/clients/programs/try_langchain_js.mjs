// LangChain for JavaScript.
import { AIMessage, HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { expect, key, model, onlyC, probe, url } from "./probing.mjs";

const chat = (fields) =>
  new ChatOpenAI({ model, apiKey: key, configuration: { baseURL: url }, maxTokens: 24, maxRetries: 0, ...fields });
const Order = z.object({ wood: z.enum(["oak", "ash"]), boards: z.number().int().min(1).max(9) });
const price = tool(() => "three", { name: "price", description: "Costs.", schema: z.object({ wood: z.enum(["oak", "ash"]) }) });

await probe("invoke", async () => {
  const answer = await chat().invoke("Which wood?");
  expect(answer.content && answer.usage_metadata.output_tokens, answer);
  return `${answer.usage_metadata.input_tokens} tokens in, ${answer.usage_metadata.output_tokens} out`;
});

await probe("stream with usage", async () => {
  let pieces = 0, text = "", usage;
  const asked = chat({ streamUsage: true, modelKwargs: { logit_bias: onlyC } });
  for await (const piece of await asked.stream("Which wood?")) {
    pieces += 1;
    text += piece.content;
    usage = piece.usage_metadata ?? usage;
  }
  expect(pieces > 3 && text === "c".repeat(24) && usage?.output_tokens === 24, pieces, text, usage);
  return "pieces, then usage";
});

await probe("batch", async () => `${(await chat().batch(["oak", "ash", "elm"])).length} answers`);

for (const method of ["jsonSchema", "functionCalling"]) {
  await probe(`structured output by ${method}`, async () => {
    Order.parse(await chat({ maxTokens: 300 }).withStructuredOutput(Order, { method, name: "order" }).invoke("Which?"));
    return "fits the zod schema";
  });
}

for (const tool_choice of ["required", "price"]) {
  await probe(`tool, ${tool_choice}`, async () => {
    const asked = chat({ maxTokens: 200 }).bindTools([price], { tool_choice, parallel_tool_calls: false });
    const [call] = (await asked.invoke("Which wood?")).tool_calls;
    expect(call.name === "price" && ["oak", "ash"].includes(call.args.wood), call);
    return "calls price";
  });
}

await probe("tool, streamed", async () => {
  const asked = chat({ maxTokens: 200 }).bindTools([price], { tool_choice: "required", parallel_tool_calls: false });
  let whole, pieces = 0;
  for await (const piece of await asked.stream("Which wood?")) {
    whole = whole ? whole.concat(piece) : piece;
    pieces += piece.tool_call_chunks?.length ? 1 : 0;
  }
  expect(whole.tool_calls[0].name === "price" && pieces > 2, pieces, whole.tool_calls);
  return "arguments in pieces";
});

await probe("a call and its result go back", async () => {
  const called = new AIMessage({ content: "", tool_calls: [{ id: "1", name: "price", args: { wood: "oak" } }] });
  const told = [new HumanMessage("Which?"), called, new ToolMessage({ content: "three", tool_call_id: "1" })];
  expect((await chat().bindTools([price]).invoke(told)).content);
  return "words";
});

await probe("responses", async () => {
  expect((await chat({ useResponsesApi: true }).invoke("Which wood?")).text);
  return "text";
});

await probe("prompt too long", async () => {
  const error = await chat().invoke("x".repeat(40_000)).catch((error) => error);
  expect(error.code === "context_length_exceeded" || /maximum context length/.test(error.message), error.name, error.message);
  return error.name;
});
