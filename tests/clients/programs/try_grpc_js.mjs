// grpc-js, with the protocol as the server's own reflection tells it.
import { Metadata, credentials, status } from "@grpc/grpc-js";
import reflection from "grpc-js-reflection-client";
import { expect, grpc, key, probe } from "./probing.mjs";

const meta = new Metadata();
meta.set("authorization", `Bearer ${key}`);
const open = credentials.createInsecure();
let client;

for (const version of ["v1", "v1alpha"]) {
  await probe(`reflection ${version}`, async () => {
    const reflected = new reflection.GrpcReflection(grpc, open, {}, version);
    const services = await reflected.listServices("*", meta);
    expect(services.includes("intarsia.v1.Inference"), services);
    const told = await reflected.getDescriptorBySymbol("intarsia.v1.Inference", meta);
    const { Inference } = told.getPackageObject({ keepCase: true, enums: String, longs: Number }).intarsia.v1;
    client = new Inference(grpc, open);
    return services.sort().join(", ");
  });
}

const ask = (method, asked, given = meta) =>
  new Promise((resolve, reject) => client[method](asked, given, (error, answer) => (error ? reject(error) : resolve(answer))));

async function streamed(asked, read = () => true) {
  const call = client.Generate(asked, meta);
  const found = [];
  for await (const message of call) {
    found.push(message);
    if (!read(message)) call.cancel();
  }
  return found;
}

await probe("GetModelInfo", async () => {
  const facts = await ask("GetModelInfo", {});
  return `${Object.keys(facts).length} facts`;
});

await probe("Tokenize and back", async () => {
  const ids = await ask("Tokenize", { text: "The inlay" });
  const back = await ask("Detokenize", { ids: ids.ids });
  expect(back.text === "The inlay", back);
  return `${ids.ids.length} tokens`;
});

await probe("Generate, streamed", async () => {
  const found = await streamed({ text: "The inlay", sampling: { max_tokens: 24, ignore_eos: true } });
  const count = found.flatMap((message) => message.token_ids).length;
  expect(count === 24 && found.at(-1).usage, count);
  return "24 tokens, then usage";
});

await probe("Generate by a schema", async () => {
  const json_schema = JSON.stringify({ enum: ["oak", "ash"] });
  const text = (await streamed({ text: "Which?", sampling: { max_tokens: 24, json_schema } })).map((one) => one.text).join("");
  expect(["oak", "ash"].includes(JSON.parse(text)), text);
  return "fits the schema";
});

await probe("cancel", async () => {
  const error = await streamed({ text: "The", sampling: { max_tokens: 5000, ignore_eos: true } }, () => false).catch((e) => e);
  expect(error.code === status.CANCELLED, error);
  return "CANCELLED";
});

await probe("prompt too long", async () => {
  const error = await streamed({ text: "x".repeat(40_000) }).catch((error) => error);
  expect(error.code === status.INVALID_ARGUMENT, error.code, error.message);
  return "INVALID_ARGUMENT";
});

await probe("wrong key", async () => {
  const error = await ask("GetModelInfo", {}, new Metadata()).catch((error) => error);
  expect(error.code === status.UNAUTHENTICATED, error.code, error.message);
  return "UNAUTHENTICATED";
});
