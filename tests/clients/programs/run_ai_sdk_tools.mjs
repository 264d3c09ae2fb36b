// Vercel's AI SDK: a tool that has to be called and is executed, and an object of a schema.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { key, model, question, url } from "./naiad_server.mjs";

const naiad = createOpenAICompatible({ name: "naiad", baseURL: url, apiKey: key, supportsStructuredOutputs: true });
const schema = jsonSchema({
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome"] }, days: { enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
});
const asked = { model: naiad(model), prompt: question, maxOutputTokens: 200, seed: 3, maxRetries: 0 };
const weather = tool({
  description: "Says the weather.",
  inputSchema: schema,
  execute: async ({ city, days }) => `rain in ${city} for ${days} days`,
});
const called = { ...asked, tools: { weather }, toolChoice: { type: "tool", toolName: "weather" } };

/** Asserts that an object obeys the schema. */
function check(value) {
  assert(["Oslo", "Rome"].includes(value.city));
  assert([1, 2, 3].includes(value.days));
}

const answer = await generateText(called);
assert.equal(answer.finishReason, "tool-calls");
assert.equal(answer.toolCalls.length, 1);
check(answer.toolCalls[0].input);
assert(answer.toolResults[0].output.startsWith("rain in "));

const stream = streamText(called);
let written = "";
for await (const part of stream.fullStream) if (part.type === "tool-input-delta") written += part.delta;
assert.deepEqual(JSON.parse(written), answer.toolCalls[0].input);
assert.deepEqual((await stream.toolCalls)[0].input, answer.toolCalls[0].input);

check((await generateText({ ...asked, output: Output.object({ schema }) })).output);
