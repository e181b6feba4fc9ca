// What the probes of each client share: see probing.py.
import { appendFileSync } from "node:fs";

export const { BASE_URL: url, MODEL: model, API_KEY: key, GRPC: grpc } = process.env;

// See ONLY_C in probing.py.
export const onlyC = { 66: 100 };

const LONGEST_ANSWER = 400;

export async function probe(name, run) {
  const chosen = process.argv.slice(2);
  if (chosen.length && !chosen.includes(name)) return;
  let found;
  try {
    found = { probe: name, ok: true, answered: String(await run()) };
  } catch (error) {
    if (process.env.TRACE) throw error;
    found = { probe: name, ok: false, answered: `${error?.name}: ${error?.message}`.slice(0, LONGEST_ANSWER) };
  }
  if (process.env.ANSWERS) appendFileSync(process.env.ANSWERS, `${JSON.stringify(found)}\n`);
  else console.log(JSON.stringify(found));
}

export function expect(isSo, ...about) {
  if (!isSo) throw new Error(`found ${about.map((one) => JSON.stringify(one)).join(" ")}`);
}

export async function raises(kind, run, ...words) {
  let got;
  try {
    got = await run();
  } catch (error) {
    expect(error instanceof kind, error?.name, error?.message);
    for (const word of words) expect(String(error.message).includes(word), word, error.message);
    return error.constructor.name;
  }
  throw new Error(`no ${kind.name}, but ${JSON.stringify(got)}`.slice(0, LONGEST_ANSWER));
}
