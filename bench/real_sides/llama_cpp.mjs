// llama.cpp, as children.py has the others: node llama_cpp.mjs FOLDER MODEL.gguf THREADS TOKENS
// FOLDER holds node_modules with node-llama-cpp; TOKENS is the most that a stream has, prompt included.

import path from "node:path";
import readline from "node:readline";
import { pathToFileURL } from "node:url";

const [folder, modelPath, threads, tokens] = process.argv.slice(2);
const library = path.resolve(folder, "node_modules/node-llama-cpp/dist/index.js");
const { getLlama } = await import(pathToFileURL(library).href);

const llama = await getLlama({ gpu: false, build: "never", skipDownload: true, progressLogs: false, logLevel: "error",
    maxThreads: Number(threads) });
const model = await llama.loadModel({ modelPath });

// One context for each number of streams, since llama.cpp's cache is divided among the sequences of a context.
const contexts = new Map();
async function sequencesOf(count) {
    if (!contexts.has(count)) {
        for (const context of contexts.values()) await context.context.dispose();
        contexts.clear();
        const context = await model.createContext({ sequences: count, contextSize: Number(tokens),
            batchSize: 2048, threads: { ideal: Number(threads), min: Number(threads) } });
        contexts.set(count, { context, sequences: Array.from({ length: count }, () => context.getSequence()) });
    }
    return contexts.get(count).sequences;
}

async function one(sequence, prompt, newTokens, began) {
    const times = [];
    await sequence.clearHistory();
    for await (const _ of sequence.evaluate(prompt, { temperature: 0, yieldEogToken: true })) {
        times.push((performance.now() - began) / 1000);
        if (times.length === newTokens) break;
    }
    return times;
}

console.log(JSON.stringify({ ready: true }));
for await (const line of readline.createInterface({ input: process.stdin })) {
    const { prompts, new_tokens: newTokens } = JSON.parse(line);
    const sequences = await sequencesOf(prompts.length);
    const began = performance.now();
    const times = await Promise.all(prompts.map((prompt, n) => one(sequences[n], prompt, newTokens, began)));
    console.log(JSON.stringify({ times }));
}
process.exit(0);
