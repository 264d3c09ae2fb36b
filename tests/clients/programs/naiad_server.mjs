// What the programs of all Node clients need.

import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";

export const url = process.env.NAIAD_URL;
export const model = process.env.NAIAD_MODEL;
export const key = "none";
export const question = "What is the capital of France?";
export const messages = [{ role: "user", content: question }];
// Takes minutes unless it is cancelled.
export const manyTokens = 7_000;
const patienceMs = 15_000;

/** Requests that the engine computes or that wait. */
async function numUnfinished() {
  const text = await (await fetch(`${process.env.NAIAD_METRICS}/metrics`)).text();
  return text
    .split("\n")
    .filter((line) => /^vllm:num_requests_(running|waiting)\{/.test(line))
    .reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

/** Wait until the engine has so many requests. */
export async function expectRunning(number) {
  const end = Date.now() + patienceMs;
  while ((await numUnfinished()) !== number) {
    assert(Date.now() < end, `${number} unfinished requests: did not happen within ${patienceMs} ms`);
    await sleep(50);
  }
}
